"""The vLLM side of test_vllm.py, run by vLLM's own interpreter: a request (JSON) in, vectors (JSON) out.

python vllm_embed.py REQUEST ANSWER. The request names a model folder and holds ``prompts``, each a text or a list of
token ids; the answer holds one vector a prompt.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from vllm import LLM


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    llm = LLM(
        model=request["model"],
        runner="pooling",
        dtype="float32",
        enforce_eager=True,
        max_model_len=request["max_model_len"],
        max_num_seqs=8,
        gpu_memory_utilization=0.2,
    )
    prompts = [p if isinstance(p, str) else {"prompt_token_ids": p} for p in request["prompts"]]
    vectors = [output.outputs.embedding for output in llm.embed(prompts, use_tqdm=False)]
    Path(sys.argv[2]).write_text(json.dumps(vectors), "utf-8")


if __name__ == "__main__":  # vLLM spawns workers, which import this file again
    main()
