#!/usr/bin/env python3
"""How far the gates of captured layers reach: the table in docs/numerics.md. Needs numpy and safetensors.

    bench/gate_ranges.py examples/layers/{gdn,kda,gdn2}.safetensors

G is the sum of g from the start of a chunk of 64 tokens, in log2 units; its range the first G less the last. Looked at
are whole chunks; of vector gates each feature by itself, and also blocks of 16 tokens: how many of their features, and
of their tiles of 16 features, have a range above 80.
"""

import argparse
import pathlib

import numpy
from safetensors import safe_open

CHUNK, BLOCK, LIMIT = 64, 16, 80


def ranges(g, length):
    """[runs of `length` tokens, heads, features] of g [tokens, heads, features]."""
    runs = g[: g.shape[0] // length * length].reshape(-1, length, *g.shape[1:])
    return -runs[:, 1:].sum(1)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="+", type=pathlib.Path)
    files = parser.parse_args().files
    print(f"| file | median | 90th percentile | largest | smallest g of one token | chunks and heads above {LIMIT} | "
          f"tiles of blocks above {LIMIT} | features of blocks above {LIMIT} |\n" + "|---" * 8 + "|")
    for path in files:
        with safe_open(path, framework="numpy") as file:
            natural = file.get_tensor("g").astype(numpy.float64)[0]
        vector = natural.ndim == 3
        g = (natural if vector else natural[..., None]) / numpy.log(2)
        whole = g[: g.shape[0] // CHUNK * CHUNK]
        of_chunks, of_blocks = ranges(whole, CHUNK), ranges(whole, BLOCK)
        cells = [f"{numpy.percentile(of_chunks, 50, method='lower'):.1f}", f"{numpy.percentile(of_chunks, 90):.0f}",
                 f"{of_chunks.max():.0f}", f"{natural.min():.1f}", f"{(of_chunks.max(-1) > LIMIT).mean():.0%}"]
        if vector:
            tiles = of_blocks.reshape(*of_blocks.shape[:2], -1, BLOCK).max(-1)
            cells += [f"{(tiles > LIMIT).mean():.1%}", f"{(of_blocks > LIMIT).mean():.2%}"]
        else:
            cells += ["-", "-"]
        print(f"| `{path.name}` | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
