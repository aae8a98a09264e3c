"""Damaged files, and what must come of loading one: a clear error or the right numbers."""

import random

from stored import same_result

from foldwise.results import files as storage

KINDS = ("bit", "bits", "cut", "zeros", "swapped", "inserted", "number")


def damaged(raw: bytes, kind: str, rng: random.Random) -> bytes:
    """``raw`` with damage of one kind somewhere."""
    content = bytearray(raw)
    place = rng.randrange(len(raw))
    if kind == "cut":
        return raw[:place]
    if kind in ("bit", "bits"):
        for _ in range(1 if kind == "bit" else rng.randrange(2, 40)):
            content[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    elif kind == "zeros":
        content[place : place + rng.randrange(1, 4096)] = bytes(1)
    elif kind == "swapped":
        size, other = rng.randrange(1, 512), rng.randrange(len(raw))
        one, two = raw[place : place + size], raw[other : other + size]
        content[place : place + len(two)], content[other : other + len(one)] = two, one
    elif kind == "inserted":
        content[place:place] = rng.randbytes(rng.randrange(1, 64))
    else:  # a length or an address that is huge
        content[place : place + 8] = rng.choice([b"\xff" * 8, b"\x00" * 4 + b"\x7f" + b"\x00" * 3])
    return bytes(content)


def outcome(file, result) -> str:
    """How loading a damaged file ended; raises where it gave other numbers, or no clear error."""
    try:
        found = storage.load(file)
    except ValueError as error:
        assert str(file) in str(error) and len(str(error)) < 800
        return "refused"
    same_result(result, found)
    return "right"
