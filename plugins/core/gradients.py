"""Autograd for operators: the autograd kernel, second derivatives, and autograd inside an operator's kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad

from .backends import Gradients

_PLAIN = (Tensor, torch.nn.Parameter)
_AUTOGRAD = torch._C.DispatchKey.AutogradFunctionality
transformed = torch._C._are_functorch_transforms_active  # whether within grad, vmap, ... of torch.func
_is_stack = getattr(torch._C._functorch, "is_legacy_batchedtensor", lambda tensor: False)  # torch >= 2.3
is_compiling = getattr(torch.compiler, "is_compiling", lambda: False)  # torch >= 2.3


class Differentiable:
    """An operator's autograd kernel, in place of the one that ``torch.library.register_autograd`` registers.

    The latter looks for default arguments in the schema at every call, 27 of 60 µs for a small one; our schemas have
    no defaults.

    Args:
        operator: An overload of ``torch.ops``.
        setup_context: As an autograd Function's.
        backward: Likewise, without a gradient of the function that :meth:`record` takes.
    """

    def __init__(self, operator: Any, setup_context: Callable[..., None], backward: Callable[..., tuple]):
        def forward(ctx: Any, compute: Callable[..., Any], *args: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                result = compute(*args)
                setup_context(ctx, args, result)
            return result

        def differentiate(ctx: Any, *grads: Any) -> tuple:
            return (None, *backward(ctx, *grads))

        self.operator = operator
        members = {"forward": staticmethod(forward), "backward": staticmethod(differentiate)}
        self.function: Any = type(f"{operator._opname}_function", (torch.autograd.Function,), members)
        # Function.apply, but for its search for functorch's tensors, a third of its time
        self.apply = super(torch.autograd.Function, self.function).apply  # type: ignore[misc]

    def kernel(self, keyset: Any, *args: Any) -> Any:
        """Compute what the dispatcher calls at the key of autograd."""
        if forward_ad._current_level >= 0 and any(_has_tangent(t) for t in args):
            raise NotImplementedError(
                f"{self.operator._opname} has no forward-mode derivative: use reverse mode, or the definition, "
                'within `with attn_plugins.ops.backend("reference"):`'
            )
        compute = partial(self.operator.redispatch, keyset & torch._C._after_autograd_keyset)
        if not transformed():
            return self.record(compute, args, self.function.apply)

        def lower(*args: Any) -> Any:  # the levels of torch.func below record in their turn
            with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
                return compute(*args)

        with enable_single_level_autograd_function():
            return self.record(lower, args)

    def record(self, compute: Callable[..., Any], args: Sequence[Any], apply: Callable[..., Any] | None = None) -> Any:
        """Return ``compute(*args)``, with a node of the graph where a gradient may be asked for."""
        if torch.is_grad_enabled():
            for t in args:
                if isinstance(t, Tensor) and t.requires_grad:
                    return (apply or self.apply)(compute, *args)
        with torch._C._AutoDispatchBelowAutograd():
            return compute(*args)


def is_batched_gradient(tensor: Tensor) -> bool:
    """Return whether a tensor is a stack within ``torch.autograd.grad(is_grads_batched=True)``."""
    return not is_compiling() and _is_stack(tensor)  # dynamo cannot trace the question, and knows no such tensors


def traced() -> bool:
    """Return whether a compiler or a tracer records operations."""
    return is_compiling() or torch._C._get_tracing_state() is not None


def unobserved(args: Sequence[Any]) -> bool:
    """Return whether nothing but reverse-mode autograd can observe a call, so that the dispatcher can be skipped.

    Without compilation, tracing, modes, transforms, autocast or a profiler, plain tensors on a CPU or a GPU take the
    same way through the dispatcher every time, which two crossings between Python and C++ make slow.
    """
    # Each condition is an observer of the dispatcher. One that is left out here misses calls in silence: a FLOP counter
    # counts nothing, a trace lacks the operator, autocast does not cast.
    if (
        is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or transformed()
        or torch._C._dispatch_tls_is_dispatch_key_excluded(_AUTOGRAD)
        or torch.is_inference_mode_enabled()
        or torch._C._is_any_autocast_enabled()
        or torch._C._autograd._profiler_enabled()
        or forward_ad._current_level >= 0
    ):
        return False
    for t in args:
        if isinstance(t, Tensor) and (
            type(t) not in _PLAIN or not (t.is_cpu or t.is_cuda) or t.is_neg() or t._is_zerotensor()
        ):
            return False
    return True


def _has_tangent(argument: Any) -> bool:
    return isinstance(argument, Tensor) and forward_ad.unpack_dual(argument).tangent is not None


def needed(terms: Any, needs: dict[str, bool]) -> list[tuple[str, Tensor]]:
    """Return names and tensors of the terms whose gradients are needed."""
    return [(name, term) for name, term in zip(terms._fields, terms) if needs[name]]


def target(
    term: Tensor, shape: Sequence[int], dtype: torch.dtype, fits: Callable[[Tensor], bool] | None = None
) -> Tensor:
    """Return an uninitialized tensor for a kernel to write a gradient to.

    Args:
        term: Whose gradient it is.
        shape: Of what the kernel writes, the term's own unless that broadcasts.
        dtype: Of a tensor that is not the gradient itself, whose sum or copy :func:`like_terms` returns.
        fits: Whether the kernel can write to the gradient itself, a tensor like the term. None: to any.
    """
    if term.shape == shape:
        grad = torch.empty_like(term)
        if fits is None or fits(grad):
            return grad
    return term.new_empty(shape, dtype=dtype)


def like_terms(terms: Any, grads: Gradients) -> Gradients:
    """Return gradients in the shapes, dtypes and strides of tensors like their terms, summed where terms broadcast."""
    return {name: grad if grad is None else _like(getattr(terms, name), grad) for name, grad in grads.items()}


def _like(term: Tensor, grad: Tensor) -> Tensor:
    # A compiled graph reads gradients with the strides that empty_like gave its fake ones: others are wrong numbers.
    same = grad.dtype == term.dtype and grad.shape == term.shape
    if same and grad.stride() == term.stride():
        return grad
    like = torch.empty_like(term)  # not of the term's strides, where that is a view with gaps
    return grad if same and grad.stride() == like.stride() else like.copy_(grad.sum_to_size(term.shape))


def second_gradients(
    reference: Callable[..., Tensor],
    saved: Sequence[Tensor | None],
    needs: Sequence[bool],
    wanted: Sequence[bool],
    grads: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """Return the gradients of an operator's backward.

    Args:
        reference: The operator's definition, as a function of the terms alone.
        saved: ``grad_output``, then the terms.
        needs: For each term, whether the backward computed its gradient.
        wanted: For each of ``saved``, whether its gradient is wanted.
        grads: Gradients with respect to the backward's results.

    Returns:
        One gradient for each of ``saved``, None where not wanted.
    """
    if transformed():
        return _transformed_second_gradients(reference, saved, needs, wanted, grads)
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views have the history of what they view, but none of each other's: grad_output may be a function of the
        # terms, and two terms may be one tensor.
        grad_output, *terms = (
            t if t is None else t.view_as(t) if create_graph and t.requires_grad else t.detach().requires_grad_()
            for t in saved
        )
        output = reference(*terms)
        chosen = [(t, g) for t, g, need in zip(terms, grads, needs) if t is not None and need and g is not None]
        first = torch.autograd.grad(output, [t for t, _ in chosen], grad_output, create_graph=True)
        second = torch.autograd.grad(
            first,
            [t for t, want in zip((grad_output, *terms), wanted) if want and t is not None],
            [g for _, g in chosen],
            create_graph=create_graph,
            allow_unused=True,
        )
    gradients = iter(second)
    return [next(gradients) if want else None for want in wanted]


def _transformed_second_gradients(
    reference: Callable[..., Tensor],
    saved: Sequence[Tensor | None],
    needs: Sequence[bool],
    wanted: Sequence[bool],
    grads: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """Return the same within a transform of ``torch.func``, whose levels ``torch.autograd.grad`` does not see."""
    present = {n: t for n, t in enumerate(saved) if t is not None}
    computed = [n for n in present if n and needs[n - 1] and grads[n - 1] is not None]

    def output(terms: dict[int, Tensor]) -> Tensor:
        return reference(*map(terms.get, range(1, len(saved))))

    def first(operands: dict[int, Tensor]) -> dict[int, Tensor]:
        (gradients,) = torch.func.vjp(output, {n: t for n, t in operands.items() if n})[1](operands[0])
        return {n: gradients[n] for n in computed}

    (second,) = torch.func.vjp(first, present)[1]({n: grads[n - 1] for n in computed})
    return [second.get(n) if want else None for n, want in enumerate(wanted)]


def gradients_by_image(
    reference: Callable[[Any], Tensor],
    grad_output: Tensor,
    terms: Any,
    needs: dict[str, bool],
    shared: Sequence[str] = (),
) -> Gradients:
    """Differentiate a definition one image at a time, since it stores all samples of its input.

    Args:
        reference: The definition, as a function of the terms alone.
        grad_output: Gradient of the output, (B, ...).
        terms: A ``NamedTuple`` of tensors (B, ...) or None.
        needs: By name, whether a term's gradient is needed.
        shared: Names of the terms that have no axis of images.
    """
    names = [name for name, term in zip(terms._fields, terms) if term is not None and needs[name]]
    # Inside an operator's kernel, the dispatcher has switched autograd off.
    below = torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor"):
        below = below - torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    parts = []
    for n in range(len(grad_output)):
        one = terms._make(
            term if term is None else (term if name in shared else term[n : n + 1]).detach().requires_grad_()
            for name, term in zip(terms._fields, terms)
        )
        with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), below), torch.enable_grad():
            wanted = [getattr(one, name) for name in names]
            parts.append(torch.autograd.grad(reference(one), wanted, grad_output[n : n + 1]))
    by_name = dict(zip(names, zip(*parts)))
    return {n: torch.stack(grads).sum(0) if n in shared else torch.cat(grads) for n, grads in by_name.items()}
