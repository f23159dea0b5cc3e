"""What reads and writes of a collection cost a key whose tokens are limited."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mia_serve.http.keys import Caller
    from mia_serve.http.services import Services
    from mia_serve.http.snapshot import Snapshot


async def charge_query(
    services: Services, caller: Caller, encoder: str, query: str, summaries: Sequence[str] | None = None
) -> None:
    """Count the tokens of a query, with its signature where the encoder that searches ("e1" or "e2") reads one."""
    if caller.allowance.tokens_per_minute is None:
        return
    reader = services.e2 if encoder == "e2" and services.e2 is not None else services.e1
    given = [list(summaries)] if summaries and encoder == "e2" else None

    def count() -> int:
        return sum(len(sequence.ids) for found in reader.text.queries([query], given) for sequence in found)

    caller.charge(await asyncio.get_running_loop().run_in_executor(services.threads, count))


async def charge_chunks(services: Services, caller: Caller, snapshot: Snapshot, ids: Sequence[str]) -> None:
    """Count the tokens of chunks that were written, as E1 reads them; those that are gone again are free."""
    if caller.allowance.tokens_per_minute is None or not ids:
        return
    wanted = set(ids)

    def count() -> int:
        texts = [chunk.text for chunk in snapshot.mindscape.chunks if chunk.id in wanted]
        return sum(len(sequence.ids) for sequence in services.e1.text.documents(texts))

    caller.charge(await asyncio.get_running_loop().run_in_executor(services.threads, count))
