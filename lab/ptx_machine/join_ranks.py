#!/usr/bin/env python3
"""Rewrites kernels so that one launch runs all ranks, at most 8: blocks (x, r) are those of rank r.

    join_ranks.py IN.ptx OUT.ptx

Each kernel NAME becomes NAME_joined. Its parameters become an array with an entry for each rank. replay.py --joined
launches such kernels."""

import re
import sys

RANKS, STRIDE = 8, 64  # entries, and what their size is a multiple of
BYTES = {"8": 1, "16": 2, "32": 4, "64": 8}
ENTRY = re.compile(r"\.entry\s+(\w+)\s*\(([^)]*)\)([^{]*)\{(.*?)\n\}", re.S)
PARAMETER = re.compile(r"\.param\s+(?:\.align\s+(\d+)\s+)?\.[a-z](\d+)\s+(?:\.ptr[^,]*\s)?(\w+)(?:\[(\d+)\])?")


def joined(match):
    name, parameters, directives, body = match.groups()
    end, places = 0, {}
    for alignment, bits, own, count in PARAMETER.findall(parameters):
        each = BYTES[bits]
        end += -end % int(alignment or each)
        places[own] = end
        end += each * int(count or 1)
    end += -end % STRIDE

    def loaded(found):
        own, offset = found.groups("0")
        return f"[%ranked+{places[own] + int(offset)}]" if own in places else found[0]

    def addressed(found):
        register, own = found.groups()
        return f"add.s64 {register}, %ranked, {places[own]};" if own in places else found[0]

    # The kernel's own grid has one row.
    body = re.sub(r"%(ctaid|clusterid)\.y\b", "0", re.sub(r"%(nctaid|nclusterid)\.y\b", "1", body))
    body = re.sub(r"\[(\w+)(?:\+(\d+))?\]", loaded, body)
    body = re.sub(r"mov\.[bu]64\s+(%\w+), (\w+);", addressed, body)
    left = [own for own in places if re.search(rf"\b{own}\b", body)]
    if left:
        sys.exit(f"{name}: {left[0]} is used in another way")
    begin = f"""
.reg .b32 %rank_of; .reg .b64 %ranked, %ranks;
mov.u32 %rank_of, %ctaid.y; mul.wide.u32 %ranked, %rank_of, {end};
mov.b64 %ranks, {name}_ranks; add.s64 %ranked, %ranks, %ranked;"""
    return f".entry {name}_joined(.param .align 16 .b8 {name}_ranks[{RANKS * end}]){directives}{{{begin}{body}\n}}"


text = open(sys.argv[1]).read()
open(sys.argv[2], "w").write(ENTRY.sub(joined, text))
