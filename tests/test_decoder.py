"""The KV buffer and the prefill: rollback by length, chunks that leave no one-row block."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from conftest import Loaded
from hypothesis import given
from hypothesis import strategies as st

from omnidraft.runtime.decoder import Decoder, prefill
from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.placement import Wish


class Recorder:
    """Stands in for a decoder to see which passes a prefill makes; rows are the position they end at."""

    def __init__(self) -> None:
        self.length = 0
        self.passes: list[list[int]] = []

    def run(self, ids: list[int]) -> np.ndarray:
        self.passes.append(ids)
        self.length += len(ids)
        return np.array(ids)[:, None]

    def rollback(self, length: int) -> None:
        self.length = length


@given(length=st.integers(1, 400), chunk=st.sampled_from([8, 64]), least=st.integers(1, 4))
def test_prefill_feeds_every_token_once_in_passes_wide_enough(length: int, chunk: int, least: int) -> None:
    decoder, ids = Recorder(), list(range(length))
    last = prefill(decoder, ids, chunk, least)  # type: ignore[arg-type]
    assert all(least <= len(rows) <= max(chunk, least) for rows in decoder.passes)
    fed = [token for rows in decoder.passes for token in rows]
    assert fed[:length] == ids and decoder.length == length
    assert last[0] == ids[-1]


@pytest.mark.model
@pytest.mark.parametrize("precision", ["int8", "int4", "fp32"])
def test_prefill_gives_the_same_bits_in_any_chunks(loaded: dict[str, Loaded], precision: str) -> None:
    decoder = loaded[precision].pair.target.decoder
    decoder.reserve(256)
    for length in (1, 2, 3, 64, 65, 66, 129, 190):
        ids = np.random.default_rng(length).integers(0, decoder.vocabulary, length).tolist()
        rows = []
        for chunk in (64, 128, 5):
            decoder.rollback(0)
            rows.append(prefill(decoder, ids, chunk, 2))
        assert np.array_equal(rows[0], rows[1]) and np.array_equal(rows[0], rows[2]), length


@pytest.mark.model
def test_rollback_forgets(loaded: dict[str, Loaded]) -> None:
    decoder = loaded["fp32"].pair.target.decoder
    decoder.reserve(256)
    decoder.rollback(0)
    decoder.run([5, 6, 7])
    expected = decoder.run([8, 9]).copy()
    decoder.rollback(3)
    decoder.run([1000, 2000, 3000])
    decoder.rollback(3)
    assert np.array_equal(decoder.run([8, 9]), expected)
    with pytest.raises(ValueError, match="roll back"):
        decoder.rollback(decoder.length + 1)
    with pytest.raises(ValueError, match="do not fit"):
        decoder.run([1] * (decoder.capacity + 1))


def test_a_file_that_is_no_graph_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"not a graph")
    with pytest.raises(OmniDraftError, match=r"model\.onnx.*export again"):
        Decoder(tmp_path / "model.onnx")


@pytest.mark.model
def test_a_provider_that_is_not_there_is_named(bundle: Path) -> None:
    with pytest.raises(OmniDraftError, match=r"model\.onnx: .*this ONNX Runtime has no NnapiExecutionProvider"):
        Decoder(bundle / "drafter/model.onnx", wish=Wish("nnapi", strict=True))
