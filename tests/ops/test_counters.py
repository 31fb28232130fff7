"""Counters that trace a model see our operators, and count half of torch's figure: a multiply-add as one operation."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from fvcore.nn import ActivationCountAnalysis, FlopCountAnalysis
from torch.utils.flop_counter import FlopCounterMode

from attn_plugins.core import counters
from tests.ops.contract_examples import EXAMPLES
from tests.ops.test_contract import Layer, example


@pytest.mark.parametrize("name", EXAMPLES)
def test_fvcore_counts_multiply_adds_and_outputs(name):
    some = example(name)
    model, inputs = Layer(some), tuple(some.tensors.values())
    with FlopCounterMode(display=False) as torchs:
        torch.jit.trace(model, inputs, check_trace=False)
    expected = {
        packet.__name__: count // 2
        for packet, count in torchs.get_flop_counts()["Global"].items()
        if packet._qualified_op_name.startswith("attn_plugins::")
    }
    counted = FlopCountAnalysis(model, inputs).unsupported_ops_warnings(False).by_operator()
    assert expected
    assert {key: counted[key] for key in expected} == expected
    kept = ActivationCountAnalysis(model, inputs).unsupported_ops_warnings(False).by_operator()
    assert len(expected) != 1 or [kept[key] for key in expected] == [model(*inputs).numel()]


@pytest.mark.slow
def test_counters_are_not_imported_and_may_be_imported_later(python):
    python(
        "import sys, attn_plugins.ops\n"
        "assert not {'fvcore', 'mmengine'} & set(sys.modules)\n"
        "import fvcore.nn\n"
        "assert 'attn_plugins::deform_conv2d' in sys.modules['fvcore.nn.flop_count']._DEFAULT_SUPPORTED_OPS"
    )


def test_a_counter_without_its_table_is_named(caplog):
    counters._register(ModuleType("counter"), table="HANDLES", count=lambda *_: 0)
    assert caplog.messages == ["counter has no HANDLES: it will not count this package's operators"]
