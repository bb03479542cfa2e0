"""Unbatched rows, run one by one, give mlx-lm's output for a single request."""

import numpy as np
import pytest

pytest.importorskip("mlx.core")

import mlx.core as mx

from mlx_dp.worker.engine.decode_caches import UnbatchedRows
from tests.support.batches.tiny_batches import Alone, loaded_tiny, prefilled, prompt_of

pytestmark = pytest.mark.mlx


@pytest.mark.parametrize("name", ["llama_dynamic_rope", "llama4", "qwen3_next", "gemma3_text"])
def test_rows_of_unequal_length_answer_as_alone(name):
    loaded = loaded_tiny(name)
    rows = UnbatchedRows(loaded)
    alone = {
        key: Alone(loaded, prompt_of(length, key)) for key, length in ((4, 21), (2, 1), (7, 9))
    }
    for key, request in alone.items():
        prefill = prefilled(loaded, request.tokens)
        rows.join(key, prefill.caches, prefill.done)
    assert rows.keys == (4, 2, 7)
    assert rows.used_tokens == 20 + 0 + 8
    for _ in range(3):
        for key, request in alone.items():
            found = rows.forward(key, mx.array(request.tokens[-1:], dtype=mx.int32))
            np.testing.assert_allclose(np.array(found[0]), request.next_logits(), atol=1e-4)
    assert [rows.length(key) for key in rows.keys] == [23, 3, 11]


def test_what_a_row_takes_is_counted_and_given_back():
    loaded = loaded_tiny("llama")
    rows = UnbatchedRows(loaded)
    prefill = prefilled(loaded, prompt_of(20))
    rows.join(3, prefill.caches, prefill.done)
    assert 3 in rows and 4 not in rows
    assert rows.nbytes == prefill.nbytes == 20 * loaded.shape.kv_bytes_per_token
    with pytest.raises(AssertionError, match="row 3 is here already"):
        rows.join(3, prefill.caches, prefill.done)
    rows.leave(3)
    assert (rows.nbytes, rows.used_tokens, rows.arrays()) == (0, 0, [])


def test_a_row_that_holds_nothing_yet_has_no_content():
    loaded = loaded_tiny("qwen3_next")
    rows = UnbatchedRows(loaded)
    prefill = prefilled(loaded, [7])
    rows.join(0, prefill.caches, prefill.done)
    assert rows.content(0) is None
    rows.forward(0, mx.array([7], dtype=mx.int32))
    content = rows.content(0)
    assert content is not None
    assert content.length == 1
