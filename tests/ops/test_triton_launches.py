"""Repeated launches: ours find the variant that Triton's own route finds, and pass it the same arguments."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.triton_checks import needs_triton

# Triton's binder, cache and launch code as they are; what it would compile is replaced by its key, and the device by
# one that launches nothing. Tensors are the CPU's, of which Triton reads only dtype and address.
LAUNCHES = """
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from attn_plugins.ops import backend, triton_launch
from attn_plugins.ops.criss_cross import criss_cross_attention as criss_cross
from attn_plugins.ops.everywhere import global_attention, sequence_attention
from attn_plugins.ops.sampled import deform_conv

class Device:
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 7)
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))

driver.set_active(Device())
launched = []

def compile(self, key, signature, device, constants, options, attributes, warmup):
    kernel = object.__new__(CompiledKernel)
    kernel.module = kernel.function = kernel.packed_metadata = kernel.name = (self, key)
    kernel.src = None
    kernel._run = lambda *args: launched.append(args)
    self.device_caches[device][0][key] = kernel
    return kernel

JITFunction._do_compile = compile
torch.cuda.device_of = lambda tensor: torch.no_grad()
triton_launch.refusal = lambda tensor: None

def drawn(*shape, dtype, shift):
    return torch.randn(shape[:-1] + (shape[-1] + shift,)).to(dtype)[..., shift:]

def calls():
    for dtype in (torch.float32, torch.bfloat16):
        for H, W, d, shift in ((5, 7, 16, 0), (5, 7, 16, 1), (16, 16, 16, 0), (1, 33, 24, 0), (1, 32, 24, 3)):
            def maps(*last):
                return drawn(2, 3, H, W, *last, dtype=dtype, shift=shift)
            def sequence(*last):
                return drawn(2, 3, H * W, *last, dtype=dtype, shift=shift)
            yield global_attention.ATTEND, (maps(d), maps(d), maps(d), maps(H), maps(W), None), (0.5,)
            yield global_attention.ATTEND, (maps(d), maps(d), maps(d), None, None, None), (0.5,)
            logits = sequence(5), None, None
            yield sequence_attention.ATTEND, (sequence(d), sequence(d), sequence(d), *logits), (None, 0, True, 0.5)
            logits = None, None, sequence(H * W)
            yield sequence_attention.ATTEND, (sequence(d), sequence(d), sequence(d), *logits), (None, 0, False, 0.5)
            yield criss_cross.ATTEND, (maps(d), maps(d), maps(d), None), (0.5, True)
            x, offset = (drawn(2, n, H, W, dtype=dtype, shift=shift) for n in (16 * (1 + shift), 18))
            weight = drawn(4 + shift, 16 * (1 + shift), 3, 3, dtype=dtype, shift=0)
            yield deform_conv.CONVOLVE, (x, offset, weight, None, None), ((1, 1), (1, 1), (1, 1), 1, 1)

def run():
    launched.clear()
    for operator, terms, options in calls():
        torch.manual_seed(0)
        terms, options = operator.terms(*terms), operator.options(*options)
        needs = [term is not None for term in terms]
        with backend("triton"):
            results = operator._forward(*terms, *options)
            results = results if isinstance(results, tuple) else (results,)
            kept = [results[n] for n in operator._kept]
            operator._backward(torch.ones_like(results[0]), *terms, *kept, *options, needs)
    return [shown(args) for args in launched]

def shown(args):
    grid, stream, (kernel, key), rest = args[:3], args[3], args[4], args[9:]  # 6 to 8 are for profilers
    values = [(each.dtype, each.shape, each.stride(), each.data_ptr() % 16) if torch.is_tensor(each) else each
              for each in rest]
    return grid, stream, kernel.__name__, key, values

first, again = run(), run()  # Triton's route where a variant is new, then ours alone
assert len(first) > 150 and len(triton_launch._compiled) > 40
triton_launch._launches_are_known = lambda: False
by_triton = run()
assert len(by_triton) == len(first) == len(again)
for one, two, three in zip(first, again, by_triton):
    assert one == two == three, (one, two, three)
print(len(first), "launches of", len(triton_launch._compiled), "variants")
"""


@needs_triton
def test_variants_and_arguments_are_those_of_triton(python):
    done = python(LAUNCHES, TRITON_INTERPRET="0", PYTHONPATH=str(Path(__file__).parents[2]))
    assert "launches of" in done.stdout
