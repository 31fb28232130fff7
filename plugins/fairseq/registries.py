"""Registration that can be repeated, as by ``importlib.reload`` or by an import after one that failed halfway."""

from __future__ import annotations

from fairseq import criterions, models, tasks


def forget(module: str) -> None:
    """Remove what an earlier run of ``module`` registered: fairseq refuses or ignores names that it already has.

    Every module that registers something calls this first, with its own name.
    """
    architectures = models.ARCH_MODEL_REGISTRY, models.ARCH_MODEL_NAME_REGISTRY, models.ARCH_CONFIG_REGISTRY
    for entries, options in (
        (models.MODEL_REGISTRY, models.MODEL_DATACLASS_REGISTRY),
        (tasks.TASK_REGISTRY, tasks.TASK_DATACLASS_REGISTRY),
        (criterions.CRITERION_REGISTRY, criterions.CRITERION_DATACLASS_REGISTRY),
    ):
        for name in [name for name, kind in entries.items() if kind.__module__ == module]:
            tasks.TASK_CLASS_NAMES.discard(entries.pop(name).__name__)
            options.pop(name, None)
            of_model = models.ARCH_MODEL_INV_REGISTRY.get(name, [])
            for architecture in of_model[:]:
                # fairseq itself registers the model's name; architectures that users added stay.
                if models.ARCH_CONFIG_REGISTRY[architecture].__module__ in (module, models.__name__):
                    of_model.remove(architecture)
                    for registry in architectures:
                        del registry[architecture]
