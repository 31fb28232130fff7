"""Invalid arguments of the operators: a single error names them."""

from __future__ import annotations

import re

import pytest
import torch

from attn_plugins import ops
from attn_plugins.ops.examples import drawing, examples

ATTENTION = ["global_attention", "sequence_attention", "window_attention", "criss_cross_attention"]
EXAMPLES = examples(drawing("cpu", torch.float32))


@pytest.mark.parametrize("operator", ATTENTION)
@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -float("inf"), None, "3", [1.0], 1j, torch.ones(())])
def test_scale_is_a_finite_number(operator, scale):
    function, arguments, options = EXAMPLES[operator]
    with pytest.raises((ValueError, TypeError), match=r"^scale must be a (finite )?number, got"):
        function(*arguments, **options, scale=scale)


def test_a_whole_number_is_a_scale():
    function, arguments, options = EXAMPLES["window_attention"]
    output = function(*arguments, **options, scale=2)
    torch.testing.assert_close(output, function(*arguments, **options, scale=2.0), rtol=0, atol=0)


@pytest.mark.parametrize("operator", ["deform_conv2d", "deform_conv1d", "window_attention"])
@pytest.mark.parametrize("number", [2**31, 2**63, -1, 2.0])
def test_integers_are_below_two_to_the_31(operator, number):
    function, arguments, options = EXAMPLES[operator]
    words = f"at least 1 and below 2**31, got {number}"
    with pytest.raises(ValueError, match=re.escape(words)):
        function(*arguments, **{**options, "dilation": number})


@pytest.mark.parametrize("start", [2.0, [0], "3", torch.ones(2)])
def test_start_is_an_int(start):
    function, arguments, options = EXAMPLES["sequence_attention"]
    with pytest.raises(TypeError, match=r"^start must be an int or None, got"):
        function(*arguments, **options, start=start)
    with pytest.raises(ValueError, match=r"start must be at least 0 and below 2\*\*31, got 2147483648"):
        function(*arguments, **options, start=2**31)


@pytest.mark.parametrize("causal", [None, 2, 1.0, "3", [True], torch.ones(2)])
def test_causal_is_a_bool(causal):
    function, arguments, options = EXAMPLES["sequence_attention"]
    with pytest.raises(TypeError, match=r"^causal must be a bool, got"):
        function(*arguments, **options, causal=causal)


def test_the_message_names_what_does_not_fit_the_logits():
    """A wrong size shows up in another tensor; the message also names the tensor that sets the size."""
    value, logits = torch.zeros(2, 1, 4, 5, 3), torch.zeros(1, 3, 4, 5, 9)
    for call, name in (
        (lambda: ops.criss_cross_attention(None, None, value, logits), "value"),
        (lambda: ops.window_attention(None, None, value, logits, 3), "value"),
        (lambda: ops.global_attention(None, None, value, row_logits=logits[..., :4]), "value"),
        (lambda: ops.window_attention(None, None, value[0], logits, (3, 3)), "value"),
        (lambda: ops.sequence_attention(None, None, value[0], band_logits=logits[0, :, :, :3]), "value"),
    ):
        with pytest.raises(ValueError, match=rf"logits must have shape .*\b{name}\b.*, got"):
            call()
