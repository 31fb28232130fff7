"""Scenes of pasted objects, and true sentences about them.

A :class:`Scene` is the content of a picture, with measured boxes. All statements (how many, how large, where, what is
above, beside or between what) are decided on these boxes, with a margin, so that a sentence also looks true.
:func:`describe` puts them into varied words, in lower case and without punctuation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np

from tools.datasets.pasting import DIGITS

Box = tuple[float, float, float, float]  # left, top, right, bottom, in pixels

NOUNS: dict[str, tuple[tuple[str, str], ...]] = {  # names of each kind of object, singular and plural
    **{digit: ((digit, f"{digit}es" if digit == "six" else f"{digit}s"),) for digit in DIGITS},
    "horse": (("horse", "horses"),),
    "cat": (("cat", "cats"),),
    "astronaut": (("astronaut", "astronauts"),),
    "cup": (("cup of coffee", "cups of coffee"), ("coffee cup", "coffee cups")),
    "flower": (("flower", "flowers"),),
    "coin": (("coin", "coins"),),
    "motorcycle": (("motorcycle", "motorcycles"), ("motorbike", "motorbikes")),
}
BACKGROUNDS: dict[str, tuple[str, ...]] = {  # names of what the photograph below shows
    "pagoda": ("a pagoda", "a chinese temple"),
    "flower": ("a flower", "an orange flower"),
    "astronaut": ("an astronaut", "a woman in a space suit"),
    "cat": ("a cat", "a tabby cat"),
    "cup": ("a cup of coffee", "a coffee cup"),
    "rocket": ("a rocket", "a rocket at night"),
    "photographer": ("a photographer", "a man with a camera"),
    "coin": ("coins", "old coins"),
    "bricks": ("a brick wall", "bricks"),
    "grass": ("grass", "a lawn"),
    "gravel": ("gravel", "small stones"),
    "moon": ("the moon", "the surface of the moon"),
    "galaxies": ("galaxies", "the night sky"),
    "motorcycle": ("a motorcycle", "a red motorcycle"),
}
SURFACES = ("bricks", "grass", "gravel", "moon")  # things lie "on grass", but not "on a cat"
NUMBERS = ("no", "a", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
SIZES = {"small": ("small", "little"), "large": ("large", "big")}
SMALL, LARGE = (0.22, 0.30)  # maximum side of a small and minimum side of a large object, relative to the picture
RELATIONS = {
    "above": ("above", "over"),
    "below": ("below", "under", "beneath"),
    "left": ("left of", "to the left of"),
    "right": ("right of", "to the right of"),
}
NEAR, NEAR_WORDS = 0.2, ("next to", "beside")  # side by side, with a gap of at most this share of the picture's side
EDGE, MIDDLE = 0.36, (0.36, 0.64)  # centres within this share of a side are at it; within this range, in the middle
PLACES = {
    "middle": ("in the middle", "in the centre"),
    **{f"{v} {h}": (f"in the {v} {h} corner",) for v in ("top", "bottom") for h in ("left", "right")},
    "top": ("at the top",),
    "bottom": ("at the bottom",),
    "left": ("on the left",),
    "right": ("on the right",),
}
PICTURES = ("a photograph of", "a photo of", "a picture of")


@dataclass(frozen=True)
class Group:
    """All objects of one kind and colour in a scene."""

    kind: str
    colour: str | None
    boxes: tuple[Box, ...]

    @property
    def union(self) -> Box:
        left, top, right, bottom = zip(*self.boxes)
        return min(left), min(top), max(right), max(bottom)

    @property
    def centres(self) -> list[tuple[float, float]]:
        return [((box[0] + box[2]) / 2, (box[1] + box[3]) / 2) for box in self.boxes]


@dataclass(frozen=True)
class Scene:
    """A square picture of ``side`` pixels: its background and the groups on it, of distinct kinds and colours."""

    side: int
    background: str
    groups: tuple[Group, ...]

    def size(self, group: Group) -> str | None:
        """Return ``'small'`` or ``'large'`` if all objects of the group are, else None."""
        longer = [max(box[2] - box[0], box[3] - box[1]) / self.side for box in group.boxes]
        return "small" if max(longer) <= SMALL else "large" if min(longer) >= LARGE else None

    def places(self, group: Group) -> list[str]:
        """Return the names of the PLACES that contain all objects of the group, the most exact first."""
        across, down = (np.array(axis) / self.side for axis in zip(*group.centres))
        at = {
            "left": (across <= EDGE).all(),
            "right": (across >= 1 - EDGE).all(),
            "top": (down <= EDGE).all(),
            "bottom": (down >= 1 - EDGE).all(),
            "middle": ((across > MIDDLE[0]) & (across < MIDDLE[1]) & (down > MIDDLE[0]) & (down < MIDDLE[1])).all(),
        }
        return [place for place in PLACES if all(at[part] for part in place.split())]

    def relation(self, one: Group, other: Group) -> str | None:
        """Return the relation of ``one`` to ``other``, a key of RELATIONS: they are apart mostly in that direction."""
        a, b = one.union, other.union
        right, down = ((a[i] + a[i + 2] - b[i] - b[i + 2]) / 2 for i in (0, 1))  # from the other's centre to this one's
        if abs(down) > abs(right):
            if a[3] <= b[1]:
                return "above"
            return "below" if b[3] <= a[1] else None
        if a[2] <= b[0]:
            return "left"
        return "right" if b[2] <= a[0] else None

    def near(self, one: Group, other: Group) -> bool:
        """Return whether two groups are side by side, partly at the same height."""
        a, b = one.union, other.union
        gap, shared = max(a[0] - b[2], b[0] - a[2]), min(a[3], b[3]) - max(a[1], b[1])
        return self.relation(one, other) in ("left", "right") and gap <= NEAR * self.side and shared > 0

    def between(self, one: Group, other: Group, third: Group) -> bool:
        """Return whether ``one`` is between the other two, horizontally or vertically."""
        first, second = self.relation(one, other), self.relation(third, one)
        return first is not None and first == second


class Grammar:
    """Sentences about one scene, drawn with ``rng``."""

    def __init__(self, rng: np.random.Generator, scene: Scene) -> None:
        self.rng, self.scene = rng, scene

    def pick(self, options: Sequence[str]) -> str:
        return options[int(self.rng.integers(len(options)))]

    def chance(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    def count(self, number: int, following: str) -> str:
        if number == 1 and following[0] in "aeiou" and not following.startswith("one"):
            return f"an {following}"
        return f"{NUMBERS[number]} {following}"

    def objects(self, group: Group) -> str:
        """Return ``two large red sevens``: enough to distinguish the group from the others."""
        alike = sum(other.kind == group.kind for other in self.scene.groups) > 1
        words = []
        size = self.scene.size(group)
        if size and self.chance(0.4):
            words.append(self.pick(SIZES[size]))
        if group.colour and (alike or self.chance(0.85)):
            words.append(group.colour)
        if group.kind in DIGITS and self.chance(0.1):
            words.append("handwritten")
        words.append(self.pick([names[len(group.boxes) > 1] for names in NOUNS[group.kind]]))
        return self.count(len(group.boxes), " ".join(words))

    def place(self, group: Group) -> str | None:
        """Return ``in the top left corner``, or None if the group has no particular place."""
        places = self.scene.places(group)
        return self.pick(PLACES[places[0] if self.chance(0.8) else self.pick(places)]) if places else None

    def placed(self, group: Group) -> str:
        place = self.place(group)
        return f"{self.objects(group)} {place}" if place else self.objects(group)

    def related(self, one: Group, other: Group) -> str | None:
        """Return ``two red sevens above a coin``, or None if there is no clear relation."""
        relation = self.scene.relation(one, other)
        if relation is None:
            return None
        near = self.scene.near(one, other) and self.chance(0.3)
        words = self.pick(NEAR_WORDS if near else RELATIONS[relation])
        return f"{self.objects(one)} {words} {self.objects(other)}"

    def core(self, groups: Sequence[Group]) -> str:
        """Return a phrase with all of ``groups``, by a relation if there is one."""
        groups = [groups[int(i)] for i in self.rng.permutation(len(groups))]
        if len(groups) == 1:
            return self.placed(groups[0]) if self.chance(0.65) else self.objects(groups[0])
        if len(groups) == 2:
            if self.chance(0.75) and (phrase := self.related(*groups)):
                return phrase
            return " and ".join(map(self.placed if self.chance(0.6) else self.objects, groups))
        if self.chance(0.6):
            for one, other, third in permutations(groups):
                if self.scene.between(one, other, third):
                    return f"{self.objects(one)} between {self.objects(other)} and {self.objects(third)}"
        if self.chance(0.7) and (phrase := self.related(*groups[:2])) and (place := self.place(groups[2])):
            return f"{phrase} and {self.objects(groups[2])} {place}"
        return f"{self.objects(groups[0])} with {' and '.join(map(self.objects, groups[1:]))}"

    def total(self) -> str | None:
        """Return ``five digits``, or None if there are fewer than two."""
        digits = [group for group in self.scene.groups if group.kind in DIGITS]
        number = sum(len(group.boxes) for group in digits)
        if number < 2:
            return None
        colours = {group.colour for group in digits}
        colour = f"{colours.pop()} " if len(colours) == 1 and self.chance(0.5) else ""
        others = [group for group in self.scene.groups if group.kind not in DIGITS]
        rest = f" and {self.objects(others[0])}" if others and self.chance(0.6) else ""
        return f"{NUMBERS[number]} {colour}{self.pick(('digits', 'numbers'))}{rest}"

    def photograph(self) -> str:
        return f"{self.pick(PICTURES)} {self.pick(BACKGROUNDS[self.scene.background])}"

    def with_background(self, core: str) -> str:
        """Return ``core`` on its background, in one of several orders."""
        if self.chance(0.25):
            return f"{self.photograph()} with {core}"
        if any(core.endswith(f" {words}") for place in PLACES.values() for words in place) and self.chance(0.5):
            return f"{self.started(core)} of {self.photograph()}"
        if self.scene.background in SURFACES and self.chance(0.5):
            return f"{self.started(core)} on {self.pick(BACKGROUNDS[self.scene.background])}"
        return f"{self.started(core)} on {self.photograph()}"

    def started(self, core: str) -> str:
        """Return ``core``, sometimes as a sentence."""
        if self.chance(0.75):
            return core
        return f"there {'is' if core.split()[0] in ('a', 'an') else 'are'} {core}"

    def full(self) -> str:
        """Describe everything: all groups and the background."""
        return self.with_background(self.core(self.scene.groups))

    def partial(self) -> str:
        """Describe some groups, or only the number of digits, with or without the background."""
        core = self.total() if self.chance(0.25) else None
        if core is None:
            groups = list(self.scene.groups)
            kept = int(self.rng.integers(1, len(groups) + 1))
            core = self.core([groups[int(i)] for i in self.rng.permutation(len(groups))[:kept]])
        return self.with_background(core) if self.chance(0.7) else self.started(core)


def describe(rng: np.random.Generator, scene: Scene, number: int) -> list[str]:
    """Return ``number`` different captions: the first two of the whole scene, the others of parts of it."""
    grammar = Grammar(rng, scene)
    captions: list[str] = []
    while len(captions) < number:
        make: Callable[[], str] = grammar.full if len(captions) < 2 else grammar.partial
        if (caption := make()) not in captions:
            captions.append(caption)
    return captions
