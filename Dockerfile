# syntax=docker/dockerfile:1
# The inference server. For a CPU:  docker build -t mia:cpu .
# For NVIDIA GPUs:                  docker build -t mia:cuda --build-arg DEVICE=cuda .
# For Ray (docs/deploy.md):         add --build-arg EXTRAS=serve,llm,quickstart,ray
ARG PYTHON=3.11

FROM python:${PYTHON}-slim-bookworm AS build
ARG DEVICE=cpu
ARG EXTRAS=serve,llm,quickstart
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
RUN python -m venv /opt/mia
COPY scripts/constraints.txt scripts/constraints.txt
# torch first and alone: it is most of the image, and stays in Docker's cache when our own code changes. The wheel of
# PyPI brings CUDA's libraries along, so that the host needs a driver and the NVIDIA container toolkit only.
RUN case "$DEVICE" in \
      cpu) index=https://download.pytorch.org/whl/cpu ;; \
      cuda) index=https://pypi.org/simple ;; \
      *) echo "DEVICE is '$DEVICE'; allowed are cpu, cuda" >&2; exit 1 ;; \
    esac \
 && /opt/mia/bin/pip install --constraint scripts/constraints.txt \
      --index-url "$index" --extra-index-url https://pypi.org/simple torch
COPY pyproject.toml README.md LICENSE ./
COPY mia_serve mia_serve
COPY mia_train mia_train
RUN /opt/mia/bin/pip install --constraint scripts/constraints.txt ".[${EXTRAS}]" \
 && /opt/mia/bin/mia-serve --help > /dev/null

FROM python:${PYTHON}-slim-bookworm
RUN useradd --uid 10001 --create-home --shell /usr/sbin/nologin mia \
 && install --directory --owner=mia --group=mia --mode=0750 /data
COPY --from=build /opt/mia /opt/mia
COPY recipes/serve_container_cpu.yaml recipes/serve_container_gpu.yaml /etc/mia/
# Models, vectors, keys and collections all lie in the volume; the rest of the file system may be read-only.
ENV PATH=/opt/mia/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    HF_HOME=/data/models MIA_CACHE=/data/vectors RAY_USAGE_STATS_ENABLED=0
USER 10001
WORKDIR /data
VOLUME /data
EXPOSE 8100
# uvicorn drains on SIGTERM; `docker stop` must wait longer than the configuration's drain_s.
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=15s --timeout=12s --start-period=300s --retries=3 \
  CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8100/health', timeout=11)"]
ENTRYPOINT ["mia-serve"]
CMD ["serve", "/etc/mia/serve_container_cpu.yaml"]
