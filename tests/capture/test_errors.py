# SPDX-License-Identifier: Apache-2.0
import pytest

from cudagraphs.capture import errors

OOM = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which 1.00 GiB is "
    "free. Of the allocated memory 130.00 GiB is allocated by PyTorch, with 96.50 GiB allocated in private pools "
    "(e.g., CUDA Graphs), and 1.00 GiB is reserved by PyTorch but unallocated."
)


def explained(message, kind="RuntimeError", phase="capture", trace="", rules=lambda text: ()):
    return errors.explain(
        {"phase": phase, "type": kind, "message": message, "traceback": trace, "memory": {"reserved": 5}}, rules
    )


@pytest.mark.parametrize("code", sorted(errors.CAPTURE_ERRORS))
def test_every_code_is_known_by_its_name_and_by_its_message(code):
    name, message, cause, mend = errors.CAPTURE_ERRORS[code]
    for text in (f"CUDA error: x\nSearch for `{name}' in the CUDA documentation", f"CUDA error: {message}"):
        failure = explained(text)
        assert (failure.kind, failure.code, failure.name, failure.cause, failure.mend) == (
            "capture",
            code,
            name,
            cause,
            mend,
        )


def test_an_invalidated_capture_gives_way_to_the_error_behind_it():
    text = f"CUDA error: {errors.CAPTURE_ERRORS[901][1]}"
    assert explained(text).code == 901
    assert explained(text, trace=f"first: {errors.CAPTURE_ERRORS[900][1]}").code == 900


def test_out_of_memory_carries_the_pool_figures():
    failure = explained(OOM, "OutOfMemoryError")
    assert failure.kind == "out-of-memory" and failure.memory == {"reserved": 5, "private_pool": int(96.5 * 2**30)}
    assert "the capture" in failure.cause


def test_an_assert_while_building_is_a_refusal_with_our_rule():
    failure = explained(
        "moe recompute is not supported with moe_router", "AssertionError", "build", rules=lambda text: ["CG001"]
    )
    assert failure.kind == "refused" and failure.rules == ("CG001",) and "validate_constraints" in failure.mend


def test_an_assert_without_words_is_known_by_its_source_line():
    trace = "Traceback ...\n  File \"m.py\", line 3, in f\n    assert count == 0\n           ^^^^\nAssertionError\n"
    asked = []
    failure = explained("", "AssertionError", "capture", trace, rules=lambda text: asked.append(text) or ["CG730"])
    assert failure.message == "assert count == 0" and failure.rules == ("CG730",) and set(asked) == {"assert count == 0"}
    assert explained("", "AssertionError", "capture", "no source").message == "AssertionError"


def test_an_unknown_error_keeps_its_own_words():
    failure = explained("something new\nsecond line", "ValueError", "warmup", "Traceback ...")
    assert failure.kind == "error" and failure.message == "something new" and failure.detail == "Traceback ..."


@pytest.mark.parametrize(
    ("status", "word"),
    [(-11, "SIGSEGV"), (-9, "host memory"), (3, "exit status 3"), (None, "None"), (-200, "signal 200")],
)
def test_a_death_without_a_report_names_what_is_known(status, word):
    assert word in errors.died("parity", status, "tail").cause


def test_a_hang_at_the_end_points_to_the_cleanup_and_one_elsewhere_does_not():
    assert "delete_graphs" in errors.hung("close", 5, "", "").mend
    assert "delete_graphs" not in errors.hung("parity", 5, "step 3", "").mend


def test_an_illegal_access_names_attention_that_must_not_be_in_a_graph():
    failure = explained("CUDA error: an illegal memory access was encountered", kind="AcceleratorError", phase="train")
    assert "no multiple of 128" in failure.cause and "9.15.1" in failure.mend and "NCCL_GRAPH_REGISTER=0" in failure.mend
