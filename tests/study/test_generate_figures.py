"""Generation rates from token stamps, and the peers' copy of the model."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from helpers.model_runner import forward, load_on_numpy
from helpers.tiny_models import make_tiny_model
from tests.bench.generate_figures import Reply, Samples, decode_slices, equal_tokens
from tests.bench.generate_peer import Recorder
from tests.bench.generate_peer_model import make_hf_directory, unpermute
from tests.bench.peers import LineProcess, PeerUnavailable, last_line, run


def make_stamps(num_requests: int, num_tokens: int, *, first: float, step: float) -> list[list[float]]:
    """Requests begin a step apart and then all get a token every `step` seconds."""
    return [[first + step * (at + token) for token in range(num_tokens)] for at in range(num_requests)]


def test_decode_slices_of_steady_requests_give_the_step_time_over_their_number():
    slices = decode_slices(make_stamps(4, 64, first=1.0, step=0.1))
    assert len(slices) == 60 // 8
    np.testing.assert_allclose(slices, 0.1 / 4)


def test_decode_slices_leave_out_the_time_before_the_last_request_began_and_after_the_first_ended():
    steady = [[10.0 + 0.5 * token for token in range(20)] for _ in range(2)]
    early_and_late = [[0.1 * token for token in range(100)] + [10.5 + 0.5 * token for token in range(40)]]
    np.testing.assert_allclose(decode_slices([*steady, *early_and_late]), 0.5 / 3)


def test_decode_slices_without_common_time_are_empty():
    assert decode_slices([[0.0, 1.0], [2.0, 3.0]]) == []


def test_samples_one_slow_slice_moves_neither_median_nor_p10():
    stamps = make_stamps(1, 161, first=2.0, step=0.01)
    stamps[0][80:] = [stamp + 5.0 for stamp in stamps[0][80:]]
    samples = Samples()
    samples.add(Reply(stamps, [list(range(161))], 100.0), prompt_tokens=512)
    rates = samples.rates("any", 1)
    assert (rates.decode, rates.decode_p10) == (pytest.approx(100), pytest.approx(100))
    assert (rates.prefill, rates.first_token_seconds, rates.resident_mib) == (256, 2.0, 100.0)


def test_samples_with_no_common_decoding_give_no_decode_rate():
    samples = Samples()
    samples.add(Reply([[0.5, 1.0], [2.0, 3.0]], [[1, 2], [1, 2]], 1.0), prompt_tokens=10)
    assert samples.rates("any", 2).decode is None
    assert samples.rates("any", 2).prefill == 10


@pytest.mark.parametrize(
    ("first", "second", "count"), [([1, 2, 3], [1, 2, 3], 3), ([1, 2], [1, 3], 1), ([], [1], 0), ([1, 2], [1], 1)]
)
def test_equal_tokens_counts_up_to_the_first_difference(first, second, count):
    assert equal_tokens(first, second) == count


def test_recorder_stamps_every_token_of_a_prompt_in_order():
    recorder = Recorder(2)
    recorder.add(1, 7, 8)
    recorder.add(1, 9)
    assert recorder.token_ids == [[], [7, 8, 9]]
    assert recorder.stamps[0] == []
    assert recorder.stamps[1][0] == recorder.stamps[1][1] <= recorder.stamps[1][2]


@pytest.mark.parametrize(("tied", "dtype"), [(True, "F32"), (False, "BF16"), (True, "Q8_0"), (True, "Q4_1")])
def test_hf_directory_of_a_gguf_model_computes_the_same_logits(tmp_path, tied, dtype):
    source = make_tiny_model(tmp_path / "gguf", tied=tied, dtype=dtype)
    target = make_hf_directory(source, tmp_path / "hf")
    token_ids = [5, 9, 200, 41, 77, 3, 150]
    rows = range(len(token_ids))
    expected, logits = (forward(load_on_numpy(path), token_ids, rows=rows) for path in (source, target))
    np.testing.assert_allclose(logits, expected, atol=1e-5)


def test_hf_directory_that_is_whole_is_not_written_again(tmp_path):
    source = make_tiny_model(tmp_path / "gguf")
    target = make_hf_directory(source, tmp_path / "hf")
    (target / "model.safetensors").unlink()
    make_hf_directory(source, target)
    assert not (target / "model.safetensors").exists()
    assert json.loads((target / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def test_unpermute_puts_the_even_members_of_the_pairs_first_in_each_head():
    rows = np.arange(8.0)[:, None]  # two heads of dim 4: pairs (0, 1), (2, 3) and (4, 5), (6, 7)
    np.testing.assert_array_equal(unpermute(rows, 2)[:, 0], [0, 2, 1, 3, 4, 6, 5, 7])


def test_peer_that_fails_to_start_gives_the_last_line_of_its_complaint(tmp_path):
    with pytest.raises(PeerUnavailable, match=r"No such file|can't open file"):
        LineProcess(make_python(tmp_path), "no_such_script.py")


def test_peer_that_does_not_answer_in_time_is_ended(tmp_path):
    script = tmp_path / "silent.py"
    script.write_text("import time; time.sleep(60)")
    with pytest.raises(PeerUnavailable, match="its process ended"):
        LineProcess(make_python(tmp_path), str(script), limit_seconds=0.5)


def test_command_that_fails_raises_with_the_last_line_it_said():
    with pytest.raises(PeerUnavailable, match=r"a bad thing$"):
        run(["/bin/sh", "-c", "echo fine; echo 'a bad thing' >&2; exit 3"])
    assert last_line("\n \n") == "nothing was said"


def make_python(directory):
    """A Python as an environment has it, without the cost of one."""
    (directory / "bin").mkdir()
    (directory / "bin" / "python").symlink_to(Path(sys.executable).resolve())
    return directory / "bin" / "python"
