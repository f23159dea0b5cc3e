"""The encode path that training and serving share."""

from mia_serve.core.encoder import EncodeFailed, Encoder, QueryViews, embed_batch
from mia_serve.core.errors import MiaError
from mia_serve.core.pooling import Sequence, SequenceBatch, pad_sequences, pool_spans
from mia_serve.core.scoring import fuse_views, normalise
from mia_serve.core.spec import SPEC_FILE, EncoderSpec
from mia_serve.core.template import MIA_INSTRUCTION, Template
from mia_serve.core.tokenise import TextTokeniser

__all__ = [
    "MIA_INSTRUCTION",
    "SPEC_FILE",
    "EncodeFailed",
    "Encoder",
    "EncoderSpec",
    "MiaError",
    "QueryViews",
    "Sequence",
    "SequenceBatch",
    "Template",
    "TextTokeniser",
    "embed_batch",
    "fuse_views",
    "normalise",
    "pad_sequences",
    "pool_spans",
]
