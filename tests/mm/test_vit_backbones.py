"""ViTAdapter and ViTPyramid as backbones: timm's weights, what is frozen, checkpoints of the paper's code."""

from __future__ import annotations

import re
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from multiprocessing import get_context
from typing import Any

import numpy as np
import pytest
import timm
import torch
from mmdet.registry import MODELS as MMDET_MODELS
from mmengine.config import Config
from mmengine.optim import build_optim_wrapper
from mmengine.registry import MODELS, init_default_scope
from mmengine.runner import load_checkpoint
from safetensors.torch import save_file
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import attn_plugins.mmcv
from attn_plugins import accelerate, restore
from tests.mm.mm_helpers import ROOT, without_downloads

SMALL: dict[str, Any] = dict(embed_dim=24, depth=3, num_heads=2, img_size=64)
PAPERS = dict(SMALL, class_token=False, global_pool="avg", init_values=1.0)  # the paper's transformer


def backbone(kind: str = "ViTAdapter", vit: str = "vit_tiny_patch16_224", **options: Any) -> Any:
    torch.manual_seed(0)
    sizes = dict(deform_num_heads=2, conv_inplane=4) if kind == "ViTAdapter" else dict(out_channels=8)
    return MMDET_MODELS.build(dict(type=kind, vit=vit, **{**sizes, "vit_kwargs": SMALL, **options}))


def trained(module: nn.Module) -> set[str]:
    return {name for name, p in module.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("kind", ["ViTAdapter", "ViTPyramid"])
@pytest.mark.parametrize("frozen", [False, True, 0, 1, 2])
def test_what_is_frozen(kind, frozen):
    model = backbone(kind, freeze_vit=frozen, vit_kwargs=dict(SMALL, drop_path_rate=0.5, pos_drop_rate=0.5))
    everything = {name for name, _ in model.vit.named_parameters()}
    last = {name for name in everything if any(name.startswith(f"blocks.{n}.") for n in range(3)[3 - int(frozen) :])}
    wanted = everything if frozen is False else set() if frozen is True else last
    assert trained(model.vit) == wanted
    assert trained(model) - {f"vit.{name}" for name in everything} == {
        name for name, _ in model.named_parameters() if not name.startswith("vit.")
    }
    for mode in (True, False):
        model.train(mode)
        training = [block.training for block in model.vit.blocks]
        count = 3 if frozen is False else 0 if frozen is True else frozen
        assert training == [mode and n >= 3 - count for n in range(3)]
        assert model.vit.pos_drop.training == (mode and frozen is False)
        assert model.training == mode
    sum(f.square().mean() for f in model.train()(torch.randn(2, 3, 64, 64))).backward()
    assert {name for name, p in model.vit.named_parameters() if p.grad is not None} == wanted


def gradients(rank: int, world_size: int, store: str) -> list[dict[str, np.ndarray]]:
    """Train on this process's part of a batch by DistributedDataParallel, which refuses unused parameters.

    Returns the gradients of the second step by parameter, for ``freeze_vit`` False, True and 1.
    """
    distributed.init_process_group("gloo", f"file://{store}", timedelta(minutes=10), world_size, rank)
    x = torch.randn(4, 3, 64, 96, generator=torch.Generator().manual_seed(1)).chunk(world_size)[rank]
    found = []
    try:
        for frozen in (False, True, 1):
            norms = dict(type="GN", num_groups=4)  # statistics of a batch would be those of its part
            model = DistributedDataParallel(backbone(freeze_vit=frozen, init_values=0.1, norm_cfg=norms))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(2):  # DistributedDataParallel finds unused parameters in the step after
                optimizer.zero_grad()
                sum(f.exp().mean() for f in model(x)).backward()
                optimizer.step()
            own = model.module.named_parameters()
            found.append({name: p.grad.numpy().copy() for name, p in own if p.requires_grad})
    finally:
        distributed.destroy_process_group()
    return found


@pytest.mark.slow
def test_two_processes_learn_what_one_does(tmp_path):
    expected = gradients(0, 1, f"{tmp_path}/one")
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        other = pool.submit(gradients, 1, 2, f"{tmp_path}/two")
        own = gradients(0, 2, f"{tmp_path}/two")
    for one, two, joined in zip(own, other.result(), expected, strict=True):
        assert one.keys() == two.keys() == joined.keys()
        for name, wanted in joined.items():
            assert np.array_equal(one[name], two[name])
            np.testing.assert_allclose(one[name], wanted, rtol=1e-3, atol=1e-5 * np.abs(wanted).max(), err_msg=name)
            assert np.any(wanted)


def test_the_names_are_seen_from_mmdet_and_the_norm_is_that_of_norm_cfg():
    assert MODELS.get("ViTAdapter") is attn_plugins.mmcv.ViTAdapter
    model = backbone(norm_cfg=dict(type="GN", num_groups=4))
    assert isinstance(model.norm1, nn.GroupNorm)
    assert isinstance(backbone().norm1, nn.SyncBatchNorm)


@pytest.mark.parametrize("kind", ["ViTAdapter", "ViTPyramid"])
def test_init_weights_leaves_the_transformer_alone(kind, tmp_path):
    """mmengine calls ``init_weights`` of all children; timm's would draw the pretrained weights again."""
    model = backbone(kind)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.init_weights()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    torch.save({name: torch.full_like(tensor, 2) for name, tensor in before.items()}, tmp_path / "twos.pth")
    loaded = backbone(kind, init_cfg=dict(type="Pretrained", checkpoint=str(tmp_path / "twos.pth")))
    loaded.init_weights()
    assert all((tensor == 2).all() for tensor in loaded.state_dict().values())


@pytest.mark.parametrize(
    ("kind", "suffix", "classes"),
    [("ViTAdapter", "pth", None), ("ViTPyramid", "safetensors", 7), ("ViTAdapter", "pth", 0)],
)
def test_timms_weights_from_a_file(kind, suffix, classes, tmp_path):
    """The head is left out, and positions of another size are resampled."""
    torch.manual_seed(5)
    options = {} if classes is None else dict(num_classes=classes)
    model = timm.create_model("vit_tiny_patch16_224", **{**SMALL, "img_size": 32}, **options)
    nn.init.normal_(model.pos_embed)
    path = str(tmp_path / f"weights.{suffix}")
    (save_file if suffix == "safetensors" else torch.save)(model.state_dict(), path)
    vit = backbone(kind, pretrained=path, vit_kwargs={**SMALL, **options}).vit
    for name in ("blocks.2.mlp.fc1.weight", "patch_embed.proj.bias", "cls_token"):
        assert torch.equal(vit.get_parameter(name), model.get_parameter(name))
    assert vit.pos_embed.shape == (1, 1 + 16, 24)
    assert not any(name.startswith(("head", "norm.", "fc_norm")) for name in vit.state_dict())


@torch.no_grad()
@pytest.mark.parametrize("kind", ["ViTAdapter", "ViTPyramid"])
def test_windows_and_decomposed_positions(kind):
    """Blocks of timm's ``VisionTransformerSAM``, ViTDet's own: at first its features, at any size."""
    windows = dict(embed_dim=24, depth=3, num_heads=2, img_size=64, window_size=3, global_attn_indexes=(1,))
    model = backbone(kind, vit="samvit_base_patch16", vit_kwargs=windows).eval()
    for parameter in model.vit.parameters():
        parameter.normal_(0, 0.2)
    seen = {}
    model.vit.blocks[2].register_forward_hook(lambda module, inputs, output: seen.update(last=output))
    for size in ((64, 64), (80, 50)):
        x = torch.randn(2, 3, *size)
        maps = model(x)
        assert [tuple(f.shape[2:]) for f in maps] == [tuple(-(-n // s) for n in size) for s in (4, 8, 16, 32)]
        found = seen["last"].permute(0, 3, 1, 2)
        alone = model.vit.forward_features(nn.functional.pad(x, (0, -size[1] % 16, 0, -size[0] % 16)))
        torch.testing.assert_close(found, alone)
        assert len(accelerate(model, onednn=False)) == 3
        for ours, stock in zip(model(x), maps):
            torch.testing.assert_close(ours, stock, rtol=1e-4, atol=1e-4)
        restore(model)


def test_weights_that_do_not_load(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"pretrained must be True, False or the path of a file, got '.*none.pth'"
    ):
        backbone(pretrained=str(tmp_path / "none.pth"))
    state = timm.create_model("vit_tiny_patch16_224", **SMALL).state_dict()
    lacking, head = {name: value for name, value in state.items() if "blocks.1.norm2" not in name}, dict(state)
    head["head.weight"], head["head.bias"] = torch.zeros(7, 24), torch.zeros(7)
    for found, message in ((lacking, r"Missing key.* \"blocks\.1\.norm2\.weight"), (head, r"head\.weight")):
        torch.save(found, tmp_path / "other.pth")
        known = (
            r"timm cannot load the weights of vit_tiny_patch16_224 by pretrained='.*other.pth'; .* must fit vit .*: "
        )
        with pytest.raises(RuntimeError, match=rf"(?s){known}.*{message}"):
            backbone(pretrained=str(tmp_path / "other.pth"))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (dict(vit="resnet18", vit_kwargs={}), TypeError, "vit must be a VisionTransformer, Eva or .*, got 'resn"),
        (dict(vit="naflexvit_base_patch16_gap", vit_kwargs={}), TypeError, "got 'naflexvit_base_patch16_gap'"),
        (dict(freeze_vit=4), ValueError, "freeze_vit must be True, False, or how many of the 3 blocks .* got 4"),
        (dict(freeze_vit="all"), ValueError, "freeze_vit must be True, False, .* got 'all'"),
        (dict(deform_num_heads=5), ValueError, "deform_num_heads must divide the width of vit, 24, got 5"),
        (dict(vit_kwargs=dict(SMALL, patch_drop_rate=0.1)), ValueError, "create it with patch_drop_rate=0"),
    ],
)  # fmt: skip
def test_bad_arguments(options, error, message):
    with pytest.raises(error, match=message):
        backbone(**options)


def papers_checkpoint(prefix: str) -> dict[str, Tensor]:
    """Return random parameters under the names and in the shapes of the paper's class, width 24, 3 blocks."""
    C, M, K, hidden = 24, 2, 4, 6
    shapes: dict[str, tuple[int, ...]] = {
        "pos_embed": (1, 17, C), "patch_embed.proj.weight": (C, 3, 16, 16), "patch_embed.proj.bias": (C,),
        "level_embed": (3, C), "up.weight": (C, C, 2, 2), "up.bias": (C,),
    }  # fmt: skip
    for n in range(3):
        block = {"norm1": (C,), "attn.qkv": (3 * C, C), "attn.proj": (C, C), "norm2": (C,), "mlp.fc1": (4 * C, C),
                 "mlp.fc2": (C, 4 * C)}  # fmt: skip
        for name, shape in block.items():
            shapes |= {f"blocks.{n}.{name}.weight": shape, f"blocks.{n}.{name}.bias": shape[:1]}
        shapes |= {f"blocks.{n}.gamma1": (C,), f"blocks.{n}.gamma2": (C,)}
    parts = {
        f"interactions.{n}.{kind}": levels for n in range(3) for kind, levels in (("injector", 3), ("extractor", 1))
    }
    parts |= {f"interactions.2.extra_extractors.{n}": 1 for n in range(2)}
    for part, L in parts.items():
        points = M * L * K
        layers = {"query_norm": (C,), "feat_norm": (C,), "attn.sampling_offsets": (2 * points, C),
                  "attn.attention_weights": (points, C), "attn.value_proj": (C, C),
                  "attn.output_proj": (C, C)}  # fmt: skip
        if part.endswith("injector"):
            shapes[f"{part}.gamma"] = (C,)
        else:
            layers |= {
                "ffn_norm": (C,),
                "ffn.fc1": (hidden, C),
                "ffn.dwconv.dwconv": (hidden, 1, 3, 3),
                "ffn.fc2": (C, hidden),
            }
        for name, shape in layers.items():
            shapes |= {f"{part}.{name}.weight": shape, f"{part}.{name}.bias": shape[:1]}
    convs = {
        "stem.0": (4, 3),
        "stem.3": (4, 4),
        "stem.6": (4, 4),
        "conv2.0": (8, 4),
        "conv3.0": (16, 8),
        "conv4.0": (16, 16),
    }
    shapes |= {f"spm.{name}.weight": (*shape, 3, 3) for name, shape in convs.items()}
    for n, width in enumerate((4, 8, 16, 16), 1):
        shapes |= {f"spm.fc{n}.weight": (C, width, 1, 1), f"spm.fc{n}.bias": (C,)}
    norms = {"spm.stem.1": 4, "spm.stem.4": 4, "spm.stem.7": 4, "spm.conv2.1": 8, "spm.conv3.1": 16, "spm.conv4.1": 16}
    for name, width in (norms | {f"norm{n}": C for n in range(1, 5)}).items():
        shapes |= {f"{name}.{kind}": (width,) for kind in ("weight", "bias", "running_mean", "running_var")}
        shapes[f"{name}.num_batches_tracked"] = ()
    return {prefix + name: torch.rand(shape) for name, shape in shapes.items()}


def test_checkpoints_of_the_papers_code(tmp_path):
    """Every parameter gets its value, in the backbone alone and in a detector's checkpoint."""
    given = papers_checkpoint("")
    model = backbone(vit_kwargs=PAPERS)
    model.load_state_dict(dict(given))
    own = model.state_dict()
    assert len(own) == len(given)
    assert torch.equal(own["vit.pos_embed"], given["pos_embed"][:, 1:])
    last = "interactions.2.extra_extractors.1.ffn.dwconv"
    for ours, theirs in {
        "vit.blocks.1.ls1.gamma": "blocks.1.gamma1",
        "vit.blocks.2.ls2.gamma": "blocks.2.gamma2",
        "vit.blocks.0.attn.qkv.weight": "blocks.0.attn.qkv.weight",
        f"{last}.weight": f"{last}.dwconv.weight",
        "interactions.0.injector.attn.sampling_offsets.bias": "interactions.0.injector.attn.sampling_offsets.bias",
    }.items():
        assert torch.equal(own[ours], given[theirs])
    torch.save({"state_dict": papers_checkpoint("backbone.")}, tmp_path / "detector.pth")
    detector = nn.ModuleDict({"backbone": backbone(vit_kwargs=PAPERS)})
    load_checkpoint(detector, str(tmp_path / "detector.pth"), strict=True)
    missing = dict(given)
    del missing["blocks.0.gamma1"]
    with pytest.raises(RuntimeError, match=r"vit\.blocks\.0\.ls1\.gamma"):
        model.load_state_dict(missing)


def test_our_own_checkpoints_load():
    model, other = backbone(), backbone(vit_kwargs=dict(SMALL, qkv_bias=True))
    nn.init.normal_(model.level_embed)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other.level_embed, model.level_embed)


@pytest.mark.parametrize("number", range(3))
def test_configs_of_the_page(number, tmp_path):
    blocks = re.findall(r"```python\n(_base_.*?)```", (ROOT / "docs/howto/vit-backbones.md").read_text(), re.S)
    assert len(blocks) == 3
    (tmp_path / "config.py").write_text(blocks[number])
    config = Config.fromfile(tmp_path / "config.py")
    toolkit = re.match(r'_base_ = "(\w+)::', blocks[number])[1]
    init_default_scope(toolkit)
    with torch.device("meta"):
        model = MODELS.build(without_downloads(config).model)
    assert isinstance(model.backbone, attn_plugins.mmcv.ViTAdapter)
    assert trained(model.backbone.vit) == (
        set() if number == 0 else {n for n, _ in model.backbone.vit.named_parameters()}
    )
    assert model.backbone.vit.num_prefix_tokens == (1, 0, 5)[number]
    if number == 2:
        groups = {group["lr"] for group in build_optim_wrapper(model, config.optim_wrapper).param_groups}
        assert {1e-4, 1e-4 * 0.8, 1e-4 * 0.8**13} <= groups


def test_rates_fall_from_block_to_block():
    """Layer-wise decay by mmengine's own options."""
    keys = {f"vit.blocks.{n}.": dict(lr_mult=0.5 ** (3 - n)) for n in range(3)}
    model = backbone()
    optimizer = build_optim_wrapper(
        model, dict(optimizer=dict(type="AdamW", lr=1.0), paramwise_cfg=dict(custom_keys=keys))
    )
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert [rates[id(block.mlp.fc1.weight)] for block in model.vit.blocks] == [0.125, 0.25, 0.5]
    assert rates[id(model.level_embed)] == 1.0
