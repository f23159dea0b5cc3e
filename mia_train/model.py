"""The trainable module: an encoder's backbone, whose one forward embeds queries and documents alike."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, cast

import torch
from torch import Tensor, nn

from mia_serve.core import Encoder, MiaError, SequenceBatch, embed_batch
from mia_serve.core.encoder import TOKENS_PER_BATCH
from mia_serve.core.load import load_parts
from mia_serve.core.template import instruction_prefix
from mia_train.schema import LoraSection, ModelConfig

logger = logging.getLogger(__name__)


def load_encoder(config: ModelConfig, matryoshka: tuple[int, ...] = ()) -> Encoder:
    """Open the base of a recipe on the CPU, with the recipe's changes to its spec.

    Weights are float32 (masters) unless the recipe asks for a frozen base under LoRA: bf16, or nf4 (which goes to this
    process's GPU straight away, where it has one).

    Raises:
        MiaError: The base is no encoder, or nf4 is asked for and bitsandbytes is not installed.
    """
    changes = {
        name: getattr(config, name)
        for name in ("pooling", "max_query_tokens", "max_document_tokens", "alpha", "signature_pooling")
        if getattr(config, name, None) is not None
    }
    if config.dtype == "nf4":
        encoder = _load_quantized(config.base, changes)
    else:
        dtype = {"fp32": "float32", "bf16": "bfloat16"}[config.dtype]
        encoder = Encoder.load(config.base, device="cpu", dtype=dtype, **changes)
    # The checkpoint's base is what this run starts from, also where that is itself a fine-tuned folder: an adapter
    # would otherwise be put on the wrong weights.
    spec = encoder.spec.with_changes(base=config.base, matryoshka=matryoshka, truncate_dim=None)
    if config.instruction is not None:
        causal = spec.pooling == "last" and config.instruction
        prefix = instruction_prefix(config.instruction) if causal else config.instruction
        spec = spec.with_changes(template=replace(spec.template, query_prefix=prefix))
    return Encoder(encoder.model, encoder.tokenizer, spec, encoder.device)


def _load_quantized(base: str, changes: dict[str, Any]) -> Encoder:
    """Open a base for QLoRA (Dettmers et al., 2023): linear layers in 4-bit NormalFloat, their scales in 8 bits.

    Everything else, the norms and the embeddings, becomes float32, as peft prepares it; matrix products are bfloat16.
    """
    if find_spec("bitsandbytes") is None:
        raise MiaError(
            "model.dtype: nf4 needs bitsandbytes; run `pip install bitsandbytes`, or set model.dtype: bf16 (LoRA on a "
            "16-bit base)"
        )
    from peft import prepare_model_for_kbit_training
    from transformers import BitsAndBytesConfig

    nf4 = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    model, tokenizer, spec = load_parts(base, torch.bfloat16, changes, quantization=nf4)
    # Checkpointing, which peft would switch on as the reentrant kind, is the recipe's to choose.
    model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    return Encoder(model, tokenizer, spec, next(model.parameters()).device)


def place_encoder(encoder: Encoder, device: torch.device) -> None:
    """Move an encoder, weights and batch size, to the device that the Trainer has chosen."""
    encoder.model.to(device)
    encoder.device = device
    encoder.tokens_per_batch = TOKENS_PER_BATCH.get(device.type, encoder.tokens_per_batch)


class MiaModel(nn.Module):
    """Wrap an encoder's backbone for training; the encoder keeps pointing at the same weights.

    One forward takes all sequences of a batch, which is what DistributedDataParallel wants: one forward per backward.

    Args:
        encoder: The encoder to train. With ``lora`` its ``model`` becomes the adapted one.
        lora: Adapters to add, or None for a full fine-tune.
        gradient_checkpointing: Recompute activations in the backward pass (the non-reentrant kind).
        bf16: Run the backbone in bfloat16 autocast. Pooling, fusion and loss stay float32.
    """

    def __init__(
        self,
        encoder: Encoder,
        *,
        lora: LoraSection | None = None,
        gradient_checkpointing: bool = False,
        bf16: bool = False,
    ) -> None:
        super().__init__()
        self.bf16 = bf16
        backbone: Any = encoder.model
        if hasattr(backbone, "peft_config"):
            if lora is not None:
                raise MiaError(
                    f"{encoder.spec.base} is an adapter on another model, and adapters are not put on adapters; leave "
                    "the lora section out (a full fine-tune merges it), or start from a full encoder"
                )
            backbone = backbone.merge_and_unload().requires_grad_(True)  # peft had frozen what lies under the adapter
        if lora is not None:
            backbone = add_lora(backbone, lora)
        for name, parameter in backbone.named_parameters():
            if "pooler" in name.split("."):  # no view is read from BERT's pooler; DDP would wait for its gradient
                parameter.requires_grad_(False)
        if gradient_checkpointing:
            backbone.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            if lora is not None:
                backbone.enable_input_require_grads()
        if hasattr(backbone.config, "use_cache"):
            backbone.config.use_cache = False
        encoder.model = backbone
        self.backbone: nn.Module = backbone
        self._check_masters()

    @property
    def config(self) -> Any:
        """The backbone's config, which trackers record."""
        return self.backbone.config

    @property
    def _no_split_modules(self) -> Any:
        """The layers that FSDP wraps, as transformers names them."""
        return getattr(self.backbone, "_no_split_modules", None)

    def forward(self, groups: Sequence[SequenceBatch]) -> Tensor:
        """Embed every group.

        Returns:
            (R, d) float32 unit vectors, readouts of the groups one after the other.
        """
        with torch.autocast(groups[0].input_ids.device.type, enabled=False):
            return torch.cat([embed_batch(cast(nn.Module, self._hidden), group) for group in groups])

    def _hidden(self, **inputs: Tensor) -> Any:
        # Autocast is entered here and not around the whole forward, so that pooling is never done in bfloat16.
        with torch.autocast(inputs["input_ids"].device.type, dtype=torch.bfloat16, enabled=self.bf16):
            return self.backbone(**inputs)

    def _check_masters(self) -> None:
        """Warn where trained weights are not float32: small updates of AdamW would vanish in the rounding."""
        low = [n for n, p in self.named_parameters() if p.requires_grad and p.dtype != torch.float32]
        if low:
            logger.warning(
                "%d trained tensors are not float32 (first: %s); updates below half a unit in the last place vanish. "
                "Load the base in fp32 and set training.bf16 for bfloat16 compute",
                len(low),
                low[0],
            )


def add_lora(backbone: Any, lora: LoraSection, task: str = "FEATURE_EXTRACTION") -> Any:
    """Return the backbone with trainable float32 LoRA adapters, everything else frozen.

    Args:
        backbone: The model.
        lora: Rank, scale, dropout and targets.
        task: One of PEFT's task types; what the adapted model can do beside a forward depends on it.

    Raises:
        MiaError: No module of the backbone has one of the target names.
    """
    from peft import LoraConfig, get_peft_model

    targets = lora.targets if isinstance(lora.targets, str) else list(lora.targets)
    config = LoraConfig(
        task_type=task,
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=targets,
        exclude_modules=["pooler.dense"] if getattr(backbone, "pooler", None) is not None else None,
    )
    try:
        adapted = get_peft_model(backbone, config)
    except ValueError as error:
        linear = sorted({n.rsplit(".", 1)[-1] for n, m in backbone.named_modules() if isinstance(m, nn.Linear)})
        raise MiaError(f"lora.targets {targets}: {error}; linear modules here: {', '.join(linear)}") from error
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return adapted
