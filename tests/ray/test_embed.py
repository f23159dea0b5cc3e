"""`mia-serve embed --engine ray` on a cluster of two nodes makes the vectors of the plain engine."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from mia_serve.core import Encoder
from mia_serve.mindscape.vectors import all_vectors
from tests.conftest import Run
from tests.ray.conftest import Library

pytest.importorskip("ray", reason="needs the extra ray")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def test_both_engines_make_the_same_vectors_and_a_second_run_encodes_nothing(
    library: Library, tiny_bert: Path, two_nodes: str, tmp_path: Path, run: Run
) -> None:
    plain, far, rest = (tmp_path / name for name in ("plain", "far", "rest"))
    for folder in (plain, far, rest):
        shutil.copytree(library.folder, folder)
        library.mindscape.save(folder)  # without vectors
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MIA_CACHE", "off")
        assert run("embed", "--mindscape", plain, "--encoder", tiny_bert).code == 0
    command = ("--encoder", tiny_bert, "--engine", "ray", "--ray-address", two_nodes, "--cache", tmp_path / "cache")
    made = run("embed", "--mindscape", far, *command, "--json", "-")
    different = len({c.text for c in library.mindscape.chunks} | {s.summary for s in library.mindscape.sessions})
    assert made.code == 0 and made.record["texts"]["encoded"] == different
    expected, found = all_vectors(plain), all_vectors(far)
    assert list(found) == list(expected) and len(found) == 2
    for name, (vectors, spec_hash) in expected.items():
        assert found[name][1] == spec_hash == Encoder.load(tiny_bert, device="cpu").spec_hash
        assert found[name][0].dtype == vectors.dtype and found[name][0].shape == vectors.shape
        np.testing.assert_allclose(found[name][0], vectors, atol=1e-6)
    again = run("embed", "--mindscape", rest, *command, "--json", "-")
    assert again.code == 0 and again.record["texts"]["encoded"] == 0
    for name, (vectors, _) in found.items():
        np.testing.assert_array_equal(all_vectors(rest)[name][0], vectors)
