"""Signatures: the few sessions that best cover what a query activated."""

from mia_serve.signature.greedy import Selection, select_sessions, select_signature
from mia_serve.signature.objective import DEFAULT_WEIGHTS, SetValue, set_function_value
from mia_serve.signature.pool import first_k, unique_in_order
from mia_serve.signature.prior import biased_rows, session_prior
from mia_serve.signature.record import Given, Signature, given_signatures
from mia_serve.signature.spread import activation_spread, spread_sizes

__all__ = [
    "DEFAULT_WEIGHTS",
    "Given",
    "Selection",
    "SetValue",
    "Signature",
    "activation_spread",
    "biased_rows",
    "first_k",
    "given_signatures",
    "select_sessions",
    "select_signature",
    "session_prior",
    "set_function_value",
    "spread_sizes",
    "unique_in_order",
]
