"""Attention with decomposed relative positions of transformers' SAM, ViTDet and relatives on our operator."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from attn_plugins.replacement import Place, is_replaced, place_of, restore
from attn_plugins.transformers import accelerate
from attn_plugins.transformers.decomposed import PLACES
from tests.helpers.slow_cases import slow_but
from tests.helpers.verdicts import Watch

transformers = pytest.importorskip("transformers")
INSTALLED = [place for place in PLACES if find_spec(place.module.rpartition(".")[0]) is not None]
EAGER = [place for place in INSTALLED if place.layer.endswith("VisionAttention")]
each = pytest.mark.parametrize("place", INSTALLED, ids=lambda place: place.layer)
SMALL = dict(hidden_size=16, num_attention_heads=2, patch_size=16, image_size=80, attention_dropout=0.0)


def drawn(module: nn.Module) -> Any:
    """Return the module in eval mode, with random weights: tables are zeros at the start."""
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3, generator=generator)
    return module.eval()


def config_of(place: Place, **options: Any) -> Any:
    """Return a small config of the family; ViTDet has no relative positions unless they are asked for."""
    family = import_module(place.module.replace("modeling", "configuration"))
    prefix = re.sub("(Sdpa)?Attention$", "", place.layer)
    given = dict(SMALL, mlp_dim=24, **options)
    if prefix in ("VitDet", "SegGpt"):
        given = dict(given, use_relative_position_embeddings=True)
    config = getattr(family, f"{prefix}Config")(**given)
    config._attn_implementation = "sdpa" if "Sdpa" in place.layer else "eager"
    return config


def block_of(place: Place, window: int = 0, **options: Any) -> Any:
    """Return a block of the family whose attention is of the class of ``place``, with (B, H, W, C) as its input."""
    family, config = import_module(place.module), config_of(place, **options)
    name = re.sub("(Sdpa)?Attention$", "Layer", place.layer)
    if name == "SegGptLayer":
        return drawn(Called(family.SegGptLayer(config, 0.0), 1))
    if name == "VitDetLayer":
        return drawn(Called(family.VitDetLayer(config, window_size=window)))
    return drawn(Called(getattr(family, name)(config, window)))


class Called(nn.Module):
    """A block of a family with its other arguments, from (B, H, W, C) to a tensor."""

    def __init__(self, block: nn.Module, *args: Any) -> None:
        super().__init__()
        self.block, self.args = block, args

    def forward(self, x: Tensor) -> Tensor:
        output = self.block(x.permute(0, 3, 1, 2) if "VitDet" in type(self.block).__name__ else x, *self.args)
        return output[0] if isinstance(output, tuple) else output


def attention_of(block: nn.Module) -> Any:
    return next(part for part in block.modules() if hasattr(part, "rel_pos_h"))


def rand(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(1))


class ExactSoftmax(TorchFunctionMode):
    """Compute the softmax in the dtype of its input, where stock rounds the weights of float64 to float32."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function is torch.nn.functional.softmax:
            kwargs.pop("dtype", None)
        return function(*args, **kwargs)


def results(block: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the output and all gradients."""
    block.zero_grad()
    leaf = x.clone().requires_grad_()
    output = block(leaf)
    output.sin().sum().backward()
    return [output.detach(), leaf.grad, *(p.grad for p in block.parameters())]


def runs_ours(block: nn.Module, x: Tensor, **options: Any) -> bool:
    with Watch("global_attention") as watch:
        block(x, **options)
    return watch.seen


def test_every_class_is_known():
    """No class with tables of row and column offsets is left out."""
    folder, there = Path(transformers.__file__).parent / "models", set()
    for file in folder.rglob("modeling_*.py"):
        for layer in re.split(r"^class (?=\w)", file.read_text(), flags=re.M)[1:]:
            if "rel_pos_h, self.rel_pos_w" in layer:
                there.add((f"transformers.models.{file.parent.name}.{file.stem}", re.match(r"\w+", layer)[0]))
    assert there == {(place.module, place.layer) for place in INSTALLED}


@each
@pytest.mark.parametrize(("window", "size"), [(0, (5, 5)), (0, (7, 4)), (3, (7, 4)), (4, (8, 4))], ids=str)
def test_outputs_and_gradients(place, window, size):
    """Global blocks with the tables' size and with interpolated tables, and windows with padding and without."""
    block, x = block_of(place, window).double(), rand(2, *size, 16).double()
    keys = list(block.state_dict())
    with ExactSoftmax():
        expected = results(block, x)
    (name,) = accelerate(block, onednn=False)
    assert block.get_submodule(name) is attention_of(block)
    assert list(block.state_dict()) == keys
    assert runs_ours(block, x)
    for ours, stock in zip(results(block, x), expected, strict=True):
        torch.testing.assert_close(ours, stock, rtol=1e-9, atol=1e-9)
    assert attention_of(block).rel_pos_h.grad.abs().max() > 0
    assert restore(block) == [name]
    assert not runs_ours(block, x)


@each
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision(place, dtype, autocast):
    """The result has stock's dtype and is as near to the exact one, in half-precision models and under autocast."""
    block, x = block_of(place), rand(2, 7, 4, 16)
    block, x = (block, x) if autocast else (block.to(dtype), x.to(dtype))
    attn = attention_of(block)
    with torch.no_grad():
        exact = copy.deepcopy(attn).double()(x.double())[0]
        with torch.autocast("cpu", dtype, enabled=autocast):
            stock = attn(x)[0]
            accelerate(block, onednn=False)
            ours = attn(x)[0]
            assert runs_ours(attn, x)
    assert ours.dtype == stock.dtype == dtype
    assert (ours - exact).norm() <= 1.2 * (stock - exact).norm() + 1e-6 * exact.norm()


@each
def test_stock_returns_weights_that_are_asked_for(place):
    """Stock's code returns what stock returns: weights, or None and a warning."""
    attn, x = attention_of(block_of(place)), rand(2, 7, 4, 16)
    expected = attn(x, output_attentions=True)
    accelerate(attn, onednn=False)
    assert not runs_ours(attn, x, output_attentions=True)
    assert runs_ours(attn, x)
    ours = attn(x, output_attentions=True)
    assert (expected[1] is None) == ("Sdpa" in place.layer)
    for a, b in zip(ours, expected, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


@pytest.mark.parametrize("place", EAGER, ids=lambda place: place.layer)
def test_dropout_of_weights(place):
    """Training with dropout runs stock's code; our operator runs in evaluation and without dropout."""
    block, x = block_of(place, attention_dropout=0.5), rand(2, 7, 4, 16)
    expected, attn = [], attention_of(block)
    for accelerated in (False, True):
        assert not accelerated or accelerate(block, onednn=False)
        torch.manual_seed(0)
        expected.append(block.train()(x))
    assert torch.equal(*expected)
    assert not runs_ours(block, x)
    assert runs_ours(block.eval(), x)
    attn.dropout = 0.0
    assert runs_ours(block.train(), x)


@pytest.mark.parametrize("place", EAGER, ids=lambda place: place.layer)
@pytest.mark.parametrize("reader", ["hook", "hook of all modules", "forward"])
def test_hooks_see_the_weights_of_eager_layers(place, reader):
    """Whoever sees the results of an eager layer sees its weights, as in stock."""
    attn, x, seen = attention_of(block_of(place)), rand(2, 7, 4, 16), []
    expected = attn(x)[1]
    accelerate(attn, onednn=False)
    if reader == "forward":
        own = attn.forward
        attn.forward = lambda x: seen.append(own(x)[1]) or own(x)
        attn(x)
    else:
        register = attn.register_forward_hook if reader == "hook" else nn.modules.module.register_module_forward_hook
        with register(lambda module, args, output: seen.append(output[1]) if module is attn else None):
            attn(x)
    assert torch.equal(seen[0], expected)


def sam(implementation: str) -> Any:
    options = dict(SMALL, num_hidden_layers=2, window_size=3, global_attn_indexes=[1], output_channels=8, mlp_dim=24)
    config = transformers.SamVisionConfig(**options)
    config._attn_implementation = implementation
    return drawn(transformers.SamVisionModel(config))


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_whole_encoder(implementation):
    """The encoder has stock's results, its attentions too, and goes back to our operator after it has returned them."""
    model, x = sam(implementation), rand(2, 3, 80, 80)
    with torch.no_grad():
        expected = model(x, output_attentions=True)
        names = accelerate(model, onednn=False)
        assert [name.rpartition(".")[2] for name in names] == ["attn"] * 2
        ours = model(x, output_attentions=True)
        torch.testing.assert_close(ours.last_hidden_state, expected.last_hidden_state, rtol=1e-5, atol=1e-5)
        for a, b in zip(ours.attentions or (), expected.attentions or (), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        assert len(ours.attentions or ()) == (2 if implementation == "eager" else 0)
        assert runs_ours(model, x)
        assert runs_ours(model, x, output_hidden_states=True)
        assert runs_ours(model, x, output_attentions=True) == (implementation == "sdpa")
        again = model(x).last_hidden_state
    torch.testing.assert_close(again, expected.last_hidden_state, rtol=1e-5, atol=1e-5)


@each
def test_layers_without_relative_positions_stay(place):
    attn = attention_of(block_of(place))
    switch = "use_rel_pos" if hasattr(attn, "use_rel_pos") else "use_relative_position_embeddings"
    setattr(attn, switch, False)
    with pytest.raises(ValueError, match=f"modeling_.*{place.layer}, which is not one of them"):
        accelerate(attn)
    setattr(attn, switch, True)
    x = rand(2, 7, 4, 16)
    accelerate(attn, onednn=False)
    setattr(attn, switch, False)
    assert not runs_ours(attn, x)


DROP_IN = """
import sys, torch
from tests.transformers import test_decomposed as tests
if sys.argv[1] == "before":
    [tests.block_of(place) for place in tests.INSTALLED]
from attn_plugins.transformers import drop_in
drop_in.replace()
for place in tests.INSTALLED:
    block = tests.block_of(place, 3)
    print("RESULT", place.layer, tests.runs_ours(block, tests.rand(2, 7, 4, 16)), tests.accelerate(block))
    tests.attention_of(block).use_rel_pos = tests.attention_of(block).use_relative_position_embeddings = False
    assert not tests.runs_ours(block, tests.rand(2, 7, 4, 16))

from transformers.models.sam import modeling_sam as sam
class Doubled(sam.SamVisionSdpaAttention):
    def get_rel_pos(self, *args):
        return 2 * super().get_rel_pos(*args)
place = tests.INSTALLED[1]
plain = tests.attention_of(tests.block_of(place))
doubled = tests.drawn(Doubled(tests.config_of(place), 0))
doubled.load_state_dict(plain.state_dict())
plain.rel_pos_h.data *= 2
plain.rel_pos_w.data *= 2
torch.testing.assert_close(doubled(tests.rand(2, 7, 4, 16))[0], plain(tests.rand(2, 7, 4, 16))[0])
"""


@pytest.mark.slow
@pytest.mark.parametrize("when", ["later", "before"])
def test_drop_in(when):
    """Both classes of a module are replaced; layers without positions, and a derived class's positions, are stock's."""
    done = subprocess.run(
        [sys.executable, "-c", DROP_IN, when], capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert found == [[place.layer, "True", "[]"] for place in INSTALLED]


def test_derived_classes_stay():
    from transformers.models.sam import modeling_sam

    assert place_of(type("SamVisionAttention", (modeling_sam.SamVisionAttention,), {})) is None
    attn = attention_of(block_of(INSTALLED[0]))
    accelerate(attn, onednn=False)
    assert is_replaced(type(attn))
    attn.get_rel_pos = lambda *args: modeling_sam.SamVisionAttention.get_rel_pos(attn, *args)
    assert not runs_ours(attn, rand(2, 7, 4, 16))


KINDS = {place.ours: place for place in INSTALLED}.values()  # one class for each of our functions


@pytest.mark.parametrize(
    "place",
    slow_but([place for place in KINDS if place.layer == "VitDetAttention"], [*KINDS]),
    ids=lambda place: place.layer,
)
def test_layers_compile_and_export(place):
    """Layers compile in one graph and export, with our operator in them."""
    attn, x = attention_of(block_of(place)), rand(2, 7, 4, 16)
    expected = attn(x)[0]
    accelerate(attn, onednn=False)
    torch._dynamo.reset()
    compiled = torch.compile(attn, fullgraph=True, backend="aot_eager")(x)[0]
    exported = torch.export.export(attn, (x,))
    assert "global_attention" in exported.graph_module.code
    for output in (compiled, exported.module()(x)[0]):
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
