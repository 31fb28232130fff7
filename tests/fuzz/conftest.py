"""Options of the random calls. ``-k window_attention --seed 7 --only 1234`` describes and repeats one."""

from __future__ import annotations


def pytest_addoption(parser):
    group = parser.getgroup("random calls")
    group.addoption("--calls", type=int, default=40, help="random calls of each operator (default 40)")
    group.addoption("--seed", type=int, default=0, help="seed of the random calls (default 0)")
    group.addoption("--only", type=int, metavar="NUMBER", help="describe and run one random call")
    group.addoption("--device", choices=("cpu", "cuda"), default="cpu", help="device of the random calls (default cpu)")
    group.addoption("--seconds", type=float, metavar="S", help="start no random call, but one a case, after S seconds")
