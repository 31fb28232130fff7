"""GeneralizedAttention2d.mmcv_compatible against mmcv's own module, and against loops where mmcv's is wrong."""

import itertools
import math

import pytest
import torch
from mmcv.cnn.bricks.generalized_attention import GeneralizedAttention

from attn_plugins.modules.maps.generalized_attention import GeneralizedAttention2d

SETTINGS = ["".join(bits) for bits in itertools.product("01", repeat=4)]
WRONG_IN_MMCV = ("0100", "0110", "1100", "1110")
RIGHT_IN_MMCV = [s for s in SETTINGS if s not in WRONG_IN_MMCV]


def pair(in_channels=20, num_heads=3, **options):
    """Return mmcv's module, fully randomised, and ours with its weights."""
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


def in_loops(module, x):
    """Compute mmcv's documented formula for '?1?0', one query and one key at a time."""
    e1, _, e3, _ = (bit == "1" for bit in module.attention_type)
    M, stride = module.num_heads, module.kv_stride
    d = module.in_channels // M
    k = x[:, :, ::stride, ::stride]

    def heads(conv, tensor):
        return conv(tensor).view(tensor.shape[0], M, d, *tensor.shape[2:])

    def encode(offset):
        width = module.position_embedding_dim // 2
        angles = [offset / 1000 ** (2 * i / width) for i in range(width // 2)]
        return torch.tensor([math.sin(a) for a in angles] + [math.cos(a) for a in angles], dtype=torch.float64)

    q, value = heads(module.query_conv, x), heads(module.value_conv, k)
    key = heads(module.key_conv, k) if e1 or e3 else None
    mixed = torch.zeros(x.shape[0], M, d, *x.shape[2:], dtype=torch.float64)
    for hq, wq in itertools.product(range(x.shape[2]), range(x.shape[3])):
        logits = torch.zeros(x.shape[0], M, *k.shape[2:], dtype=torch.float64)
        for hk, wk in itertools.product(range(k.shape[2]), range(k.shape[3])):
            R = module.appr_geom_fc_y.weight @ encode(hq - hk * stride)
            R = ((R + module.appr_geom_fc_x.weight @ encode(wq - wk * stride)) / math.sqrt(2)).view(M, d)
            logits[..., hk, wk] = (q[..., hq, wq] * R).sum(-1)
            if e1:
                logits[..., hk, wk] += (q[..., hq, wq] * key[..., hk, wk]).sum(-1)
            if e3:
                logits[..., hk, wk] += (module.appr_bias.view(M, d) * key[..., hk, wk]).sum(-1)
        weights = logits.flatten(2).softmax(-1)
        mixed[..., hq, wq] = torch.einsum("bmk,bmdk->bmd", weights, value.flatten(3))
    return x + module.gamma * module.proj_conv(mixed.flatten(1, 2))


@pytest.mark.parametrize("attention_type", WRONG_IN_MMCV)
def test_right_where_mmcv_is_wrong(attention_type):
    peer, ours = pair(attention_type=attention_type)
    x = torch.randn(2, 20, 4, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), in_loops(ours, x), rtol=1e-9, atol=1e-9)
        with pytest.raises(RuntimeError):
            peer(x)  # H != W
        square = x[..., :4]
        assert not torch.allclose(peer(square), ours(square), atol=1e-2)  # mmcv transposes silently
