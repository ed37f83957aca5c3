"""How long does a thread wait that maps memory, while the host memory of a GPU rank grows in the same process?

    python bench/growing.py --gigabytes 4

An engine maps memory all the time: to capture a graph, for a large array. The host memory of Forebay is touched in
the background meanwhile, for many seconds. Without a GPU, so nothing is pinned. In a virtual machine memory that
nobody had since it started is several times slower: run it twice to see that.
"""

from __future__ import annotations

import argparse
import mmap
import statistics
import time

from _about import about, print_about

from forebay.copier.pages import HostPages

SLOT_BYTES = 2 << 20
MAPPED_BYTES = 1 << 20
PAUSE_S = 0.0005


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--threads", type=int, help="that touch memory; default: as many as an engine gets")
    args = parser.parse_args()
    print_about(about())
    began = time.perf_counter()
    pages = HostPages(max(1, int(args.gigabytes * 1e9) // SLOT_BYTES), SLOT_BYTES, threads=args.threads)
    waits = []
    while pages.growing:
        begin = time.perf_counter()
        mmap.mmap(-1, MAPPED_BYTES).close()
        waits.append((time.perf_counter() - begin) * 1e3)
        time.sleep(PAUSE_S)
    seconds = time.perf_counter() - began
    waits.sort()
    print(f"grown            {pages.ready * SLOT_BYTES / seconds / 1e9:.2f} GB/s")
    print(
        f"mapping waited   median {statistics.median(waits):.3f} ms, p99 {waits[len(waits) * 99 // 100]:.3f}, "
        f"worst {waits[-1]:.3f}, of {len(waits):,}"
    )
    pages.close()


if __name__ == "__main__":
    main()
