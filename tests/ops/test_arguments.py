"""Invalid arguments of the operators: a single error names them."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch

from attn_plugins import ops
from attn_plugins.ops.examples import drawing, examples
from tests.ops.contract_examples import EXAMPLES as SMALL
from tests.ops.contract_examples import OPERATORS

ATTENTION = ["global_attention", "sequence_attention", "window_attention", "criss_cross_attention"]
PAIRS = "spatial_shapes must hold (H, W), two ints of at least 1, for each level"
LEVELS = ((5, 7), (3, 4), (1, 2))  # of the small example
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


def _z(*shape: int, **kwargs) -> torch.Tensor:
    return torch.zeros(shape, **kwargs)


NO_CONTENT = dict(query=None, key=None)
NO_LOGITS = dict(band_logits=None, outside_logits=None, position_logits=None)
# Changes of the contract's examples, and words of the error.
WRONG: dict[str, list[tuple[dict, str]]] = {
    "global_attention": [
        (dict(value=_z(2, 3, 5, 6)), r"value must have shape \(B, M, Hk, Wk, dv\)"),
        (dict(value=_z(2, 3, 0, 5, 6)), "value must have at least one key"),
        (dict(query=None), "query and key must be given together"),
        (dict(query=_z(2, 4, 3, 4, 4)), "query must have value's batch and heads"),
        (dict(query=_z(2, 3, 3, 4)), "query must have shape"),
        (dict(key=_z(2, 3, 2, 5, 3)), "key must have shape"),
        (dict(key=_z(2, 3, 5, 2, 4)), "key must have shape"),
        (dict(row_logits=_z(2, 3, 3, 4, 5)), "row_logits must have shape"),
        (dict(row_logits=_z(2, 2, 3, 4, 2)), "row_logits must have shape"),
        (dict(row_logits=_z(2, 3, 5, 4, 2)), r"row_logits must have shape \(2, 3, 3, 4, 2\), positions of query"),
        (dict(query=_z(2, 3, 1, 1, 4), row_logits=_z(2, 3, 0, 1, 2)), r"\(2, 3, 1, 1, 2\), positions of query"),
        (dict(query=_z(2, 3, 1, 1, 4), row_logits=_z(2, 3, 5, 1, 2)), r"\(2, 3, 1, 1, 2\), positions of query"),
        (dict(column_logits=_z(2, 3, 3, 4, 2)), "column_logits must have shape"),
        (dict(column_logits=_z(3, 4, 5)), "column_logits must have shape"),
        (dict(key_logits=_z(2, 3, 10)), "key_logits must have shape"),
        (dict(key_logits=_z(2, 3, 1, 5)), "key_logits must have shape"),
    ],
    "global_attention, prefix": [
        (dict(prefix_key=None), "prefix_key and prefix_value must be given together"),
        (dict(prefix_value=None), "prefix_key and prefix_value must be given together"),
        (NO_CONTENT, "prefix_key must be None where query and key are"),
        (dict(prefix_value=_z(2, 3, 2, 5)), r"prefix_value must have shape .* got \(2, 3, 2, 5\)"),
        (dict(prefix_value=_z(2, 3, 2)), r"prefix_value must have shape .* got \(2, 3, 2\)"),
        (dict(prefix_key=_z(2, 3, 3, 4)), r"prefix_key must have shape \(2, 3, 2, 4\)"),
        (dict(prefix_key=_z(2, 3, 2, 4).double()), "prefix_key must have value's dtype"),
    ],
    "sequence_attention": [
        (dict(band_logits=_z(2, 3, 5, 4)), "an odd number of them unless causal, got 4"),
        (dict(band_logits=_z(2, 3, 5, 0)), "band_logits must have at least one tap"),
        (dict(band_logits=_z(2, 3, 4, 3)), r"band_logits must have shape \(2, 3, 5, 3\), batch and heads"),
        (dict(outside_logits=_z(2, 3)), r"outside_logits must have shape \(B, M, T\)"),
        (dict(outside_logits=_z(2, 2, 5)), r"outside_logits must have shape \(2, 3, 5\)"),
        (dict(outside_logits=math.inf), "outside_logits must be finite or -inf, got inf"),
        (dict(outside_logits=math.nan), "outside_logits must be finite or -inf, got nan"),
        (dict(outside_logits="zero"), "outside_logits must be a Tensor, got str"),
        (dict(band_logits=None), "outside_logits needs band_logits"),
        (dict(position_logits=_z(2, 3, 5, 5)), r"position_logits must have shape \(2, 3, 5, 7\)"),
        (dict(key=None), "query and key must be given together"),
        (NO_CONTENT | NO_LOGITS, "query and key, band_logits or position_logits must be given"),
        (dict(value=_z(2, 3, 0, 5)), "value must have at least one key"),
        (dict(value=_z(2, 3)), r"value must have shape \(B, M, S, dv\)"),
        (dict(key=_z(2, 3, 6, 4)), r"key must have shape \(2, 3, 7, 4\)"),
        (dict(query=_z(2, 2, 5, 4)), r"query must have value's batch and heads \(2, 3\)"),
        (dict(key_padding_mask=_z(2, 7)), "key_padding_mask must be a bool Tensor, True for padding, got"),
        (dict(key_padding_mask=[False]), "key_padding_mask must be a bool Tensor, True for padding, got list"),
        (dict(key_padding_mask=_z(2, 5).bool()), r"must have shape \(2, 7\)"),
        *((dict(start=n), rf"start must be at least 0 and below 2\*\*31, got {n}") for n in (-1, 2**31)),
        *((dict(start=value), "^start must be an int or None, got") for value in (2.0, [0], "3", torch.ones(2))),
        *((dict(causal=value), "^causal must be a bool, got") for value in (None, 2, 1.0, "3", [True], torch.ones(2))),
        (dict(query=_z(2, 3, 8, 4), causal=True, start=None, **NO_LOGITS), "takes the 8 queries of query as the last"),
        (dict(segment_ids=_z(2, 7)), r"segment_ids must be an int32 Tensor, got torch.float32"),
        (dict(segment_ids=[0, 1]), r"segment_ids must be an int32 Tensor, got list"),
        (dict(segment_ids=_z(2, 6).int()), r"segment_ids must have shape \(n, 7\).*, got \(2, 6\)"),
        (dict(segment_ids=_z(4, 7).int()), r"n divides the batch of 2, got \(4, 7\)"),
        (dict(segment_ids=_z(0, 7).int()), r"n divides the batch of 2, got \(0, 7\)"),
        (dict(segment_ids=_z(2, 7, device="meta").int()), r"on value's device cpu, got meta"),
        (dict(segment_ids=_z(2, 7).int(), start=3), r"the 5 queries of query from position 3 .* 7 keys"),
    ],
    "window_attention": [
        (dict(kernel_size=4), "kernel_size must be odd if padding is None, which centres the window, got 4"),
        (dict(kernel_size=0), "kernel_size must be an int or 2 ints, each at least 1 and below"),
        (dict(kernel_size=(3, 3, 3)), "kernel_size must be an int or 2 ints"),
        (dict(dilation=0), "dilation must be"),
        (dict(stride=0), "stride must be"),
        (dict(padding=-1), "padding must be"),
        (dict(border="reflect"), "border must be one of exclude, zero, inside, got 'reflect'"),
        (dict(kernel_size=5), r"position_logits must have shape \(2, 3, 5, 7, 25\), batch and heads of value"),
        (dict(key=None), "query and key must be given together"),
        (NO_CONTENT | dict(position_logits=None), "query or position_logits must be given"),
        (dict(value=_z(2, 3, 0, 7, 5)), "value must have at least one key"),
        (dict(value=_z(2, 3)), r"value must have shape \(B, M, T, dv\) or \(B, M, H, W, dv\)"),
        (dict(key=_z(2, 3, 5, 6, 4)), r"key must have shape \(2, 3, 5, 7, 4\)"),
        (dict(query=_z(2, 2, 5, 7, 4)), r"query must have value's batch and heads \(2, 3\)"),
        (dict(query=_z(2, 3, 5, 4)), r"query must have shape \(B, M, H, W, d\)"),
        (dict(position_logits=_z(2, 3, 4, 7, 9)), "position_logits must have shape"),
    ],
    "criss_cross_attention": [
        (dict(key=None), "query and key must be given together"),
        (NO_CONTENT | dict(position_logits=None), "query and key, or position_logits, must be given"),
        (dict(value=_z(2, 3, 0, 7, 5)), "value must have at least one position"),
        (dict(value=_z(2, 3, 5, 5)), r"value must have shape \(B, M, H, W, dv\), got \(2, 3, 5, 5\)"),
        (dict(key=_z(2, 3, 5, 6, 4)), r"key must have query's shape \(2, 3, 5, 7, 4\)"),
        (dict(query=_z(2, 2, 5, 7, 4)), r"query must have value's first axes \(2, 3, 5, 7\)"),
        (dict(query=_z(2, 3, 5, 4)), r"query must have shape \(B, M, H, W, d\)"),
        (dict(position_logits=_z(2, 3, 5, 7, 11)), r"\(2, 3, 5, 7, 12\), H \+ W logits per position of value"),
        (dict(position_logits=_z(2, 2, 5, 7, 12)), "or size 1 in either of the first two axes"),
        (dict(position_logits=_z(5, 7, 12)), r"position_logits must have shape \(B, M, H, W, H \+ W\)"),
    ],
    "deform_conv2d": [
        (dict(input=_z(6, 5, 9)), r"input must have shape \(B, C, H, W\)"),
        (dict(offset=_z(2, 35, 5, 9)), "offset must have shape"),
        (dict(offset=_z(2, 36, 9, 5)), "offset must have shape"),
        (dict(offset=_z(1, 36, 5, 9)), "offset must have shape"),
        (dict(offset=_z(2, 72, 5, 9)), "D dividing the 6 channels"),
        (dict(mask=_z(2, 9, 5, 9)), "mask must have shape"),
        (dict(weight=_z(4, 4, 3, 3)), "does not fit input of 6 channels"),
        (dict(weight=_z(3, 3, 3, 3)), "does not fit input of 6 channels"),
        (dict(weight=_z(4, 3, 0, 3)), "no axis of size 0"),
        (dict(bias=_z(3)), "bias must have shape"),
        (dict(stride=(1, 1, 1)), "stride must be"),
        (dict(stride=1.5), "stride must be"),
        (dict(padding=-1), "padding must be"),
        (dict(dilation=(1, 0)), "dilation must be"),
        (dict(dilation=9), "input is too small"),
    ],
    "deform_conv1d": [
        (dict(input=_z(1, 6, 5, 6)), r"input must have shape \(B, C, L\)"),
        (dict(offset=_z(2, 7, 9)), "offset must have shape"),
        (dict(offset=_z(2, 6, 8)), "offset must have shape"),
        (dict(mask=_z(2, 12, 9)), "mask must have offset's shape"),
        (dict(stride=(1, 1)), "stride must be"),
    ],
    "deformable_attention": [
        (dict(value=_z(2, 49, 12)), r"value must have shape \(B, S, M, d\), got \(2, 49, 12\)"),
        (dict(spatial_shapes=((5, 7), (3, 4))), r"spatial_shapes must have as many pixels as value has keys, 49, got"),
        (dict(spatial_shapes=()), r"spatial_shapes must hold \(H, W\) of at least one level, got \(\)"),
        (dict(spatial_shapes=5), r"spatial_shapes must hold \(H, W\) of at least one level, got 5"),
        *[
            (dict(spatial_shapes=shapes), re.escape(f"{PAIRS}, got {shapes!r}"))
            for shapes in (
                ((5, 7), (3, 4), (2,)),
                ((7, 7), (0, 4)),
                [7, 5],
                [5, 7],
                (49,),
                "77",
                [(7, 7.0)],
                [(7, 7, 1)],
                [None],
                ((5, 7), (3, 4), 2),
                [(2**31, 1)],
            )
        ],
        (dict(spatial_shapes=torch.tensor([[7, 7], [0, 4]])), re.escape(f"{PAIRS}, got ((7, 7), (0, 4))")),
        (dict(spatial_shapes=torch.ones(3, 2)), r"must be an integer Tensor \(L, 2\), got torch.float32"),
        (dict(attention_weights=_z(2, 6, 3, 2, 2)), r"must have shape \(2, 6, 3, 3, 2\): .* got \(2, 6, 3, 2"),
        (dict(attention_weights=_z(2, 6, 3, 6)), r"weights must have shape \(B, Q, M, L, K\), got"),
        (dict(attention_weights=_z()), r"attention_weights must have shape \(B, Q, M, L, K\), got \(\)"),
        (dict(sampling_locations=_z(2, 6, 3, 3, 2, 3)), r"locations must have shape \(2, 6, 3, 3, 2, 2"),
        (dict(sampling_locations=_z(2, 5, 3, 3, 2, 2)), r"locations must have shape \(2, 6, 3, 3, 2, 2"),
        (dict(sampling_locations=_z(2, 6, 3, 6, 2)), r"must have shape \(B, Q, M, L, K, 2\), got"),
        (dict(points=(2, 2, 2)), r"attention_weights must have shape \(B, Q, M, P\), got \(2, 6, 3, 3, 2\)"),
        (dict(points=(2, 2)), "points must be an int or 3 ints"),
        (dict(points=(2, 2, -2)), "points must be an int or 3 ints, each at least 0"),
        (dict(sampling_locations=_z(2, 6, 3, 3, 2, 2).double()), "must be torch.float32 for a value"),
        (dict(attention_weights=_z(2, 6, 3, 3, 2).half()), "must be torch.float32 for a value"),
    ],
}


def test_a_list_of_numbers_is_no_list_of_sizes():
    """[4, 5] was read as ((4, 4), (5, 5)), which 41 pixels fit."""
    value, locations = _z(1, 41, 1, 4), _z(1, 1, 1, 2, 1, 2)
    with pytest.raises(ValueError, match=re.escape(f"{PAIRS}, got [4, 5]")):
        ops.deformable_attention(value, [4, 5], locations, locations[..., 0])


def test_sizes_are_ints_of_any_kind():
    call = SMALL["deformable_attention"]("small").to("cpu", torch.float32)
    expected, shapes = call.call(**call.tensors), np.array(LEVELS)
    for given in (torch.tensor(LEVELS), [torch.Size(shape) for shape in LEVELS], [tuple(shape) for shape in shapes]):
        torch.testing.assert_close(call.call(**{**call.tensors, "spatial_shapes": given}), expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", WRONG)
def test_bad_input_is_one_clear_error(name):
    some = SMALL[name]("small").to("cpu", torch.float32)
    for change, words in WRONG[name]:
        with pytest.raises((ValueError, TypeError), match=words):
            some.call(**{**some.tensors, **change})


@pytest.mark.parametrize("name", OPERATORS)
def test_a_wrong_tensor_is_named(name):
    some = SMALL[name]("small").to("cpu", torch.float32)
    for argument, tensor in some.floats().items():
        if argument in ("value", "input", "offset", "weight", "sampling_locations", "attention_weights"):
            with pytest.raises(TypeError, match=f"^{argument} must be a Tensor, got NoneType"):
                some.call(**{**some.tensors, argument: None})
        for wrong, error, words in (
            ([1.0], TypeError, "must be a Tensor.*, got list"),
            (tensor.to_sparse(), TypeError, "must be a dense Tensor, got one of layout torch.sparse_coo"),
            (tensor.double() if argument not in ("value", "input") else tensor.long(), TypeError, "must (be|have) "),
            (tensor.to("meta"), ValueError, "device"),
            (tensor[None, None, None], ValueError, "must have .*shape"),
        ):
            with pytest.raises(error, match=words) as caught:
                some.call(**{**some.tensors, argument: wrong})
            if argument not in ("value", "input"):  # which say what the others must be
                assert argument in str(caught.value)
