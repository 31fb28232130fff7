"""GeneralizedAttention2d.mmcv_compatible against mmcv's own module, and against loops where mmcv's is wrong."""

import itertools

import pytest
import torch
from mmcv.cnn.bricks.generalized_attention import GeneralizedAttention

from attn_plugins.modules.maps.generalized_attention import GeneralizedAttention2d

SETTINGS = ["".join(bits) for bits in itertools.product("01", repeat=4)]
WRONG_IN_MMCV = ("0100", "0110", "1100", "1110")
RIGHT_IN_MMCV = [s for s in SETTINGS if s not in WRONG_IN_MMCV]


def pair(in_channels=20, num_heads=3, **options):
    """Return mmcv's module, fully randomized, and ours with its weights."""
    peer = GeneralizedAttention(in_channels, num_heads=num_heads, **options)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in peer.parameters():
            if parameter.is_floating_point():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    ours = GeneralizedAttention2d.mmcv_compatible(in_channels, num_heads=num_heads, **options)
    ours.load_state_dict(peer.state_dict())
    return peer.double(), ours.double()


def check(peer, ours, shape):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    first, second = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected, output = peer(first), ours(second)
    torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-9)
    wanted = torch.autograd.grad(expected.square().sum(), [first, *dict(trainable(peer)).values()])
    gradients = torch.autograd.grad(output.square().sum(), [second, *dict(trainable(ours)).values()])
    assert [name for name, _ in trainable(peer)] == [name for name, _ in trainable(ours)]
    for actual, one in zip(gradients, wanted):
        torch.testing.assert_close(actual, one, rtol=1e-7, atol=1e-7)


def trainable(module):
    return sorted((name, p) for name, p in module.named_parameters() if p.requires_grad)


@pytest.mark.parametrize("attention_type", RIGHT_IN_MMCV)
def test_equals_mmcv(attention_type):
    check(*pair(attention_type=attention_type), (2, 20, 5, 8))
    check(*pair(attention_type=attention_type, kv_stride=1), (2, 20, 4, 3))


@pytest.mark.parametrize("options", [dict(q_stride=2), dict(q_stride=3, kv_stride=1), dict(position_magnitude=2)])
def test_options_equal_mmcv(options):
    for attention_type in ("1111", "0011", "0010"):
        check(*pair(attention_type=attention_type, **options), (2, 20, 7, 9))


@pytest.mark.parametrize("spatial_range, kv_stride", [(0, 1), (3, 2), (4, 3)])
def test_range_equals_mmcv(spatial_range, kv_stride):
    """mmcv has ranges for 256 and 512 channels only. Its (42, 42, ...) parameter of the range is dropped here."""
    options = dict(in_channels=512, num_heads=4, position_embedding_dim=8, attention_type="1011")
    peer, ours = pair(spatial_range=spatial_range, kv_stride=kv_stride, **options)
    assert "local_constraint_map" in peer.state_dict()
    assert "local_constraint_map" not in ours.state_dict()
    for module in (peer, ours):  # keep the softmax away from one-hot
        module.query_conv.weight.data /= 30
        module.appr_bias.data /= 30
    x = torch.randn(1, 512, 6, 11, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), peer(x), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("attention_type", WRONG_IN_MMCV)
def test_right_where_mmcv_is_wrong(attention_type):
    """The logits are the sum of the chosen terms of '1111', in which mmcv is right."""
    peer, ours = pair(attention_type=attention_type)
    _, whole = pair(attention_type="1111")
    ours.load_state_dict({key: whole.state_dict()[key] for key in ours.state_dict()})
    x = torch.randn(2, 20, 4, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with torch.no_grad():
        parts = whole.attention_logits(x)
        assert list(parts) == ["content", "content_position", "saliency", "position"]
        logits = sum(part for part, bit in zip(parts.values(), attention_type) if bit == "1")
        weights = logits.flatten(-2).softmax(-1).view_as(logits)
        value = ours.value_conv(x[:, :, ::2, ::2]).unflatten(1, (3, -1))
        mixed = torch.einsum("bmhwyx,bmdyx->bmdhw", weights, value).flatten(1, 2)
        torch.testing.assert_close(ours(x), x + ours.gamma * ours.proj_conv(mixed), rtol=1e-9, atol=1e-9)
        with pytest.raises(RuntimeError):
            peer(x)  # H != W
        square = x[..., :4]
        peer.load_state_dict(ours.state_dict())
        assert not torch.allclose(peer(square), ours(square), atol=1e-2)  # mmcv transposes silently
