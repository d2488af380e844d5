# SPDX-License-Identifier: Apache-2.0
"""delete_cuda_graphs() and graphs_deleted_on_exit(), against stand-ins of every megatron-core minor."""

import gc
import subprocess
import sys
from pathlib import Path

import pytest
from delete_graphs_fakes import MEGATRON, Stack

import delete_graphs
from delete_graphs import delete_cuda_graphs, graphs_deleted_on_exit

HELPERS = Path(delete_graphs.__file__).parent


@pytest.fixture
def stack(monkeypatch):
    gc.collect()
    made = Stack(monkeypatch)
    yield made
    made.keep.clear()


@pytest.mark.parametrize("minor", MEGATRON)
@pytest.mark.parametrize("initialized", [True, False], ids=["process group", "no process group"])
def test_every_minor_is_emptied_once(stack, minor, initialized):
    stack.initialized = initialized
    stack.megatron(minor)
    report = delete_cuda_graphs()
    assert report.clean and not report.failed
    assert report.live_graphs_before > 0 and report.live_graphs_after == 0
    resets = [entry for entry in stack.log if not entry.startswith("upstream") and entry != "empty_cache"]
    assert len(resets) == len(set(resets)), "nothing is reset twice"
    [runner] = stack.manager.cudagraph_runners
    assert (runner.fwd_graph, runner.bwd_graph, runner.static_grad_inputs) == (None, None, None)
    assert runner.fwd_graph_recorded, "a layer that runs again is not recorded again"
    assert stack.layer.cuda_graphs == []
    assert stack.layer.cuda_graph_manual_hooks == [] or initialized
    again = delete_cuda_graphs()
    assert again.found == {} and again.clean


def test_order_owners_before_what_they_own(stack):
    stack.initialized = True
    stack.megatron(19)

    class PartialCudaGraphManager:
        closed = False

        def close(self):
            stack.log.append("partial close")
            self.closed = True

    stack.kept(PartialCudaGraphManager())
    stack.kept(stack.graph("bare"))
    delete_cuda_graphs()
    assert [entry for entry in stack.log if entry != "empty_cache"] == [
        "partial close",
        "upstream helper delete",
        "te layer",
        "local forward",
        "local backward",
        "upstream module delete",
        "optimizer",
        "full training",
        "full validation",
        "bare",
    ]


def test_both_stages_keep_their_keys(stack):
    stack.megatron(19)
    delete_cuda_graphs()
    empty = {"training": None, "validation": None}
    assert stack.full.cuda_graph == empty and stack.full.result == empty
    assert stack.full.curr_iteration == {"training": 0, "validation": 0}
    assert (stack.optimizer.cuda_graph, stack.optimizer.result, stack.optimizer.curr_iteration) == (None, None, 0)


def test_a_key_that_bridge_removed_comes_back(stack):
    stack.megatron(17)
    del stack.full.cuda_graph["training"]
    delete_cuda_graphs()
    assert stack.full.cuda_graph == {"training": None, "validation": None}


def test_the_next_capture_gets_a_fresh_pool(stack):
    stack.megatron(19)
    delete_cuda_graphs()
    assert stack.full_module._shared_graph_pool is None
    assert stack.graphs.CudaGraphManager.global_mempool not in (None, "old pool")


def test_evaluation_that_captures_again_is_deleted_again(stack):
    stack.megatron(19)
    delete_cuda_graphs()
    stack.full.cuda_graph["validation"] = stack.graph("captured by evaluation")
    report = delete_cuda_graphs()
    assert report.deleted == {"full_iteration": 1} and "captured by evaluation" in stack.log


def test_helper_that_created_nothing_is_left_alone(stack):
    stack.initialized = True
    stack.megatron(18)
    stack.helper._graphs_created = False
    stack.layer.cuda_graphs = []
    assert "te_helper" not in delete_cuda_graphs().found
    assert "upstream helper delete" not in stack.log


def test_subclass_and_several_helpers(stack):
    stack.initialized = True
    stack.megatron(17)
    vision = stack.kept(stack.named("VisionTECudaGraphHelper", stack.helper.__module__, (type(stack.helper),))())
    vision.callables_per_chunk, vision._graphs_created = [[]], True
    assert delete_cuda_graphs().deleted["te_helper"] == 2


def test_te_callables_with_reset_and_without(stack):
    stack.kept(stack.te_callable("new"))
    report = delete_cuda_graphs()
    assert report.deleted == {"te_callable": 1} and not report.warnings

    stack.keep.clear()
    gc.collect()
    stack.module("transformer_engine", __version__="2.8.0")
    stack.kept(stack.te_callable("old", with_reset=False))
    gc.collect()
    report = delete_cuda_graphs()
    assert "old" in stack.log and report.live_graphs_after == 0
    assert len(report.warnings) == 1 and "2.8.0" in report.warnings[0] and "2.10" in report.warnings[0]


def test_one_failure_does_not_stop_the_rest(stack):
    stack.kept([stack.graph("first"), stack.graph("broken", error=RuntimeError("device lost")), stack.graph("last")])
    report = delete_cuda_graphs()
    assert {"first", "last"} <= set(stack.log)
    assert report.deleted == {"cuda_graph": 2} and not report.clean
    assert [f.reason for f in report.failed] == ["RuntimeError: device lost"]
    assert report.live_graphs_after == 1 and len(report.remaining) == 1
    assert any("device lost" in line for line in report.problems())


def test_a_broken_upstream_object_does_not_hide_the_others(stack):
    stack.initialized = True
    stack.megatron(19)
    del stack.helper._graphs_created  # a constructor that raised half way
    report = delete_cuda_graphs()
    assert [f.kind for f in report.failed] == ["te_helper"]
    assert report.live_graphs_after == 0


def test_the_holder_is_named(stack, monkeypatch):
    broken = stack.graph("broken", error=RuntimeError("no"))
    owner = stack.module("user_training", keeper=broken)
    del broken
    report = delete_cuda_graphs()
    assert report.remaining[0].held_by == "user_training.keeper"
    owner.keeper.error = None
    delete_cuda_graphs()


def test_graphs_that_the_collector_was_told_to_freeze_are_found(stack):
    stack.kept(stack.graph("frozen"))
    gc.freeze()
    assert delete_cuda_graphs().deleted == {"cuda_graph": 1}


def test_given_objects_go_first_and_may_be_nested(stack):
    first, second, third = stack.graph("first"), stack.graph("second"), stack.graph("third")
    stack.kept(third)

    def callable_with_closure():
        return second

    delete_cuda_graphs({"a": [callable_with_closure]}, first)
    assert [entry for entry in stack.log if entry != "empty_cache"] == ["second", "first", "third"]


@pytest.mark.parametrize("wrong", [5, "graph", None, 1.5, b""])
def test_plain_values_are_refused(stack, wrong):
    with pytest.raises(TypeError, match="cannot delete CUDA graphs of"):
        delete_cuda_graphs(wrong)
    with pytest.raises(TypeError, match="cannot delete CUDA graphs of"):
        graphs_deleted_on_exit(wrong)


def test_bytes_released(stack):
    stack.kept(stack.graph("one"))
    assert delete_cuda_graphs().bytes_released == 60
    assert delete_cuda_graphs(release_memory=False).bytes_released is None


def test_nothing_is_imported():
    """In a process without torch: no import, an empty report."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import delete_graphs; r = delete_graphs.delete_cuda_graphs();"
        "assert r.clean and not r.found; assert not {'torch', 'megatron', 'transformer_engine'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(HELPERS)], check=True)


@pytest.mark.parametrize("leave", [None, ValueError, KeyboardInterrupt, SystemExit])
def test_context_manager_on_every_way_out(stack, leave):
    stack.kept(stack.graph("inside"))
    guard = graphs_deleted_on_exit()
    try:
        with guard:
            if leave is not None:
                raise leave("out")
    except BaseException as error:
        assert type(error) is leave
    else:
        assert leave is None
    assert guard.report.deleted == {"cuda_graph": 1}


def test_decorator_passes_value_and_exception(stack):
    @graphs_deleted_on_exit()
    def train(fail):
        stack.kept(stack.graph(f"train {fail}"))
        if fail:
            raise ValueError("boom")
        return 42

    assert train(False) == 42
    with pytest.raises(ValueError, match="boom"):
        train(True)
    assert {"train False", "train True"} <= set(stack.log)


def test_a_failing_deletion_never_replaces_the_exception(stack):
    broken = stack.kept(stack.graph("broken", error=RuntimeError("no")))
    with pytest.raises(ZeroDivisionError), graphs_deleted_on_exit():
        _ = 1 / 0
    broken.error = None
    delete_cuda_graphs()


def test_report_as_json(stack):
    stack.kept(stack.graph("one"))
    body = delete_cuda_graphs().as_dict()
    assert body["schema_version"] == 1 and body["found"] == {"cuda_graph": 1} and body["clean"] is True
