"""Sparse allreduce on torch tensors: the nine exchanges of gradient compression of the Rust example sparse_allreduce.

    python -m fast_allreduce.examples.sparse_allreduce --ranks 4 --count 100000 --density 0.01

Each rank is a process with a vector like a gradient, of which it keeps some elements; the ranks add what they kept by one of the
paths. Each output is checked, to the bit, against what its path promises; and it has the digest that the Rust program prints
for the same ranks, count, density and seed. It needs torch and numpy.
"""

import argparse
import math
import multiprocessing

import numpy as np
import torch

import fast_allreduce as fa

# --- vectors: the same as the Rust program's for the same seed ---

_MASK = (1 << 64) - 1


def _mix(bits):
    """SplitMix64's output function (Steele, Lea and Flood, OOPSLA 2014), of numpy's wrapping numbers."""
    with np.errstate(over="ignore"):
        bits = np.asarray(bits, np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        bits = (bits ^ bits >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ bits >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        return bits ^ bits >> np.uint64(31)


def _bell(bits):
    parts = [(bits >> np.uint64(16 * part)) & np.uint64(0xFFFF) for part in range(4)]
    total = sum(parts).astype(np.float32)
    return (total / np.float32(65536) - np.float32(2)) * np.sqrt(np.float32(3))


def _even(count, regions):
    return [region * count // regions for region in range(regions + 1)]


def gradient(seed, rank, count):
    layers = 23
    shared, own = int(_mix(seed)), int(_mix(seed ^ int(_mix(rank + 1))))
    values, bounds = np.empty(count, np.float32), _even(count, layers)
    for layer, (start, end) in enumerate(zip(bounds, bounds[1:])):
        scale = np.float32(0.01) * np.float32(0.5) ** np.float32(int(_mix(shared ^ layer)) % 6)
        with np.errstate(over="ignore"):
            indexes = np.arange(start, end, dtype=np.uint64)
            both = _bell(_mix(np.uint64(shared) + indexes)) + _bell(_mix(np.uint64(own) + indexes))
        values[start:end] = scale * both
    return torch.from_numpy(values)


# --- what is kept: indexes in ascending order, and values ---


def magnitude(values):
    """The bits of |value|, which order magnitudes as numbers do."""
    return values.view(torch.int32) & 0x7FFFFFFF


def _largest(values, k):
    """Positions of the k largest magnitudes; of equal ones the first."""
    position = torch.arange(values.numel())
    key = (magnitude(values).long() << 32) | (0xFFFFFFFF - position)
    return key.topk(min(k, key.numel())).indices.sort().values


def top_k(values, k):
    indexes = _largest(values, k)
    return indexes.int(), values[indexes]


def at_least(values, threshold):
    indexes = (values.abs() >= threshold).nonzero().flatten()
    return indexes.int(), values[indexes]


def about_top_k(values, k):
    """All that reach the threshold of a sample, as in Lin et al., "Deep gradient compression", ICLR 2018."""
    count = values.numel()
    sample = magnitude(values)[:: min(max(count >> 12, 1), 64)]
    # Halves are rounded up, as in Rust.
    nth = min(max(math.floor(k * sample.numel() / count + 0.5), 1), sample.numel()) - 1
    threshold = sample.sort(descending=True).values[nth].reshape(1).view(torch.float32)
    return at_least(values, threshold)


_MIDDLE = (
    (
        3.3871328727963665, 133.14166789178438, 1971.5909503065513, 13731.69376550946,
        45921.95393154987, 67265.7709270087, 33430.57558358813, 2509.0809287301227,
    ),
    (
        1.0, 42.31333070160091, 687.1870074920579, 5394.196021424751,
        21213.794301586597, 39307.89580009271, 28729.085735721943, 5226.495278852854,
    ),
)
_NEAR_TAIL = (
    (
        1.4234371107496835, 4.630337846156546, 5.769497221460691, 3.6478483247632045,
        1.2704582524523684, 0.2417807251774506, 0.022723844989269184, 0.0007745450142783414,
    ),
    (
        1.0, 2.053191626637759, 1.6763848301838038, 0.6897673349851,
        0.14810397642748008, 0.015198666563616457, 0.0005475938084995345, 1.0507500716444169e-9,
    ),
)
_FAR_TAIL = (
    (
        6.657904643501103, 5.463784911164114, 1.7848265399172913, 0.29656057182850487,
        0.026532189526576124, 0.0012426609473880784, 2.7115555687434876e-5, 2.0103343992922881e-7,
    ),
    (
        1.0, 0.5998322065558879, 0.1369298809227358, 0.014875361290850615,
        0.0007868691311456133, 1.8463183175100548e-5, 1.421511758316446e-7, 2.0442631033899398e-15,
    ),
)

def _upper_quantile(tail):
    """Algorithm AS 241, PPND16 (Wichura, Applied Statistics 37, 1988)."""

    def ratio(table, x):
        numerator, denominator = (0.0, 0.0)
        for top, bottom in zip(reversed(table[0]), reversed(table[1])):
            numerator, denominator = numerator * x + top, denominator * x + bottom
        return numerator / denominator

    middle = 0.5 - tail
    if middle <= 0.425:
        return middle * ratio(_MIDDLE, 0.180625 - middle * middle)
    r = math.sqrt(-math.log(tail))
    return ratio(_NEAR_TAIL, r - 1.6) if r <= 5 else ratio(_FAR_TAIL, r - 5.0)


def gaussian_k(values, k):
    """By the threshold of a normal distribution: Shi et al., arXiv 1911.08772, algorithm 1."""
    count = values.numel()
    # Added one after the other, as Rust does: another order may have another threshold.
    added = lambda numbers: np.cumsum(numbers)[-1].item()  # noqa: E731
    wide = values.double().numpy()
    mean = added(wide) / count
    deviation = math.sqrt(added((wide - mean) ** 2) / count)
    threshold = torch.tensor(abs(mean) + deviation * _upper_quantile(k / count / 2), dtype=torch.float32)
    for _ in range(3):
        reaching = int((values.abs() >= threshold).sum())
        if 3 * reaching < 2 * k:
            threshold *= 0.5
        elif 3 * reaching > 4 * k:
            threshold *= 1.5
        else:
            break
    return at_least(values, threshold)


def add_to(dense, indexes, values):
    """Entries of one rank, whose indexes differ."""
    dense[indexes.long()] += values


def total(parts, count):
    """The sum of several ranks' entries, added in their order: the bits of a dense sum."""
    dense, touched = torch.zeros(count), torch.zeros(count, dtype=torch.bool)
    for indexes, values in parts:
        add_to(dense, indexes, values)
        touched[indexes.long()] = True
    indexes = touched.nonzero().flatten()
    return indexes.int(), dense[indexes]


# --- what several paths do ---


def gather_lengths(communicator, length):
    lengths = torch.empty(communicator.nranks, dtype=torch.int64)
    communicator.allgather(torch.tensor([length]), lengths)
    return lengths.tolist()


def gather_v(communicator, own, lengths):
    everything = torch.empty(sum(lengths), dtype=own.dtype)
    communicator.allgather_v(own, everything, lengths)
    return everything.split(lengths)


def gather_entries(communicator, indexes, values, output):
    """All ranks' entries, added in the order of the ranks."""
    lengths = gather_lengths(communicator, indexes.numel())
    parts = zip(gather_v(communicator, indexes, lengths), gather_v(communicator, values, lengths))
    for part in parts:
        add_to(output, *part)


def exchange(communicator, outgoing, incoming):
    """Sends entries to some ranks and receives from some, side by side. Of nothing, nothing is sent."""
    with fa.group():
        for peer, parts in outgoing:
            for tag, part in enumerate(parts):
                if part.numel():
                    communicator.send(part, peer, tag=tag)
        for peer, parts in incoming:
            for tag, part in enumerate(parts):
                if part.numel():
                    communicator.recv(part, peer, tag=tag)


def room(count):
    return torch.empty(count, dtype=torch.int32), torch.empty(count)


def counts_to_all(communicator, counts):
    received = torch.empty(communicator.nranks, dtype=torch.int32)
    communicator.alltoall(torch.tensor(counts, dtype=torch.int32), received)
    return received.tolist()


def cuts(indexes, bounds):
    """How many entries are in each region."""
    at = torch.searchsorted(indexes, torch.tensor(bounds, dtype=torch.int32))
    return (at[1:] - at[:-1]).tolist()


# --- the paths: from what a rank keeps, and k, to the output, which holds zeros ---


def dense(communicator, kept, k, output):
    add_to(output, *kept)
    communicator.allreduce(output)


def top_k_gather(communicator, kept, k, output):
    """All have as many entries, and every rank gets all."""
    indexes, values = kept
    n = communicator.nranks
    all_indexes, all_values = room(n * indexes.numel())
    communicator.allgather(indexes, all_indexes)
    communicator.allgather(values, all_values)
    for part in zip(all_indexes.view(n, -1), all_values.view(n, -1)):
        add_to(output, *part)


def gtop_k(communicator, kept, k, output):
    """The k largest by a binary tree of ranks: Shi et al., ICDCS 2019."""
    rank, n, distance = communicator.rank, communicator.nranks, 1
    while distance < n:
        if rank & distance:
            exchange(communicator, [(rank - distance, kept)], [])
            break
        if rank + distance < n:
            theirs = room(k)
            exchange(communicator, [], [(rank + distance, theirs)])
            indexes, values = total([kept, theirs], output.numel())
            best = _largest(values, k)
            kept = indexes[best], values[best]
        distance *= 2
    kept = kept if rank == 0 else room(k)
    for part in kept:
        communicator.broadcast(part, root=0)
    add_to(output, *kept)


def ok_top_k(communicator, kept, k, output):
    """The k largest of the sum: Li and Hoefler, PPoPP 2022."""
    rank, n, count = communicator.rank, communicator.nranks, output.numel()
    indexes, values = kept
    entries = indexes.numel()
    inner = torch.tensor([int(indexes[region * entries // n]) for region in range(1, n)], dtype=torch.int32)
    communicator.allreduce(inner, op="avg")
    send = cuts(indexes, [0, *inner.tolist(), count])
    receive = counts_to_all(communicator, send)
    mine = list(zip(indexes.split(send), values.split(send)))
    parts = [room(length) for length in receive]
    for first in range(1, n, 4):
        # Four peers at once: more would crowd a receiver.
        steps = range(first, min(first + 4, n))
        outgoing = [((rank + step) % n, mine[(rank + step) % n]) for step in steps]
        exchange(communicator, outgoing, [((rank - step) % n, parts[(rank - step) % n]) for step in steps])
    parts[rank] = mine[rank]
    indexes, values = total(parts, count)
    # The threshold of the k largest, found together, digit by digit.
    magnitudes, threshold, wanted = magnitude(values).long(), 0, k
    for shift, bits in ((24, 7), (16, 8), (8, 8), (0, 8)):
        begins = magnitudes[(magnitudes ^ threshold) >> (shift + bits) == 0]
        histogram = torch.bincount(begins >> shift & ((1 << bits) - 1), minlength=1 << bits).int()
        communicator.allreduce(histogram)
        for digit in reversed(range(1 << bits)):
            number = int(histogram[digit])
            if wanted <= number or digit == 0:
                threshold |= digit << shift
                break
            wanted -= number
    equal = magnitudes == threshold
    before = sum(gather_lengths(communicator, int(equal.sum()))[:rank])
    first = equal & (equal.cumsum(0) <= wanted - before)
    chosen = (magnitudes > threshold) | first
    gather_entries(communicator, indexes[chosen], values[chosen], output)


def top_k_a_opt(communicator, kept, k, output):
    """Each has as many entries as it has."""
    gather_entries(communicator, *kept, output)


def gaussian_k_concat(communicator, kept, k, output):
    """Indexes and values in one message."""
    indexes, values = kept
    words = torch.cat([indexes, values.view(torch.int32)])
    for part in gather_v(communicator, words, gather_lengths(communicator, words.numel())):
        theirs, bits = part.split(part.numel() // 2) if part.numel() else (part, part)
        add_to(output, theirs, bits.view(torch.float32))


def split_allgather(communicator, kept, k, output):
    """Each rank adds one region's entries: SparCML, Renggli et al., SC 2019."""
    indexes, values = kept
    send = cuts(indexes, _even(output.numel(), communicator.nranks))
    receive = counts_to_all(communicator, send)
    all_indexes, all_values = room(sum(receive))
    communicator.alltoall_v(indexes, send, all_indexes, receive)
    communicator.alltoall_v(values, send, all_values, receive)
    region = total(zip(all_indexes.split(receive), all_values.split(receive)), output.numel())
    gather_entries(communicator, *region, output)


PATHS = {
    "dense": (top_k, dense, "sum"),
    "top-k": (top_k, top_k_gather, "sum"),
    "gtop-k": (top_k, gtop_k, "tree"),
    "ok-topk": (top_k, ok_top_k, "top k"),
    "topk-a-opt": (about_top_k, top_k_a_opt, "sum"),
    "topk-sa": (top_k, split_allgather, "sum"),
    "gaussian-k": (gaussian_k, top_k_a_opt, "sum"),
    "gaussian-k-concat": (gaussian_k, gaussian_k_concat, "sum"),
    "gaussian-k-sa": (gaussian_k, split_allgather, "sum"),
}


# --- whether the promises are kept: by one process, and by other means ---


def promised(promise, kept, k, count):
    everything = np.zeros(count, np.float32)
    for indexes, values in kept:
        everything[indexes] += values
    if promise == "sum":
        return everything

    def best(entries):
        order = sorted(entries.items(), key=lambda entry: (-abs(float(entry[1])), entry[0]))
        return dict(order[:k])

    if promise == "top k":
        chosen = best({index: everything[index] for index in np.nonzero(everything)[0]})
    else:
        level = [dict(zip(indexes.tolist(), values)) for indexes, values in kept]
        while len(level) > 1:
            pairs = [level[at : at + 2] for at in range(0, len(level), 2)]
            level = []
            for pair in pairs:
                added = dict(pair[0])
                for index, value in pair[1].items() if len(pair) > 1 else ():
                    added[index] = added.get(index, np.float32(0)) + value
                level.append(best(added) if len(pair) > 1 else added)
        chosen = level[0]
    output = np.zeros(count, np.float32)
    for index, value in chosen.items():
        output[index] += value
    return output


def digest(output):
    """FNV-1a over 32-bit words, as the Rust program prints it."""
    value = 0xCBF29CE484222325
    for word in output.view(np.uint32).tolist():
        value = (value ^ word) * 0x100000001B3 & _MASK
    return value


def rank_of_all(rank, nranks, unique_id, count, density, seed):
    """Runs every path; the digest of each, on rank 0. A promise that is broken is an exception."""
    torch.set_num_threads(1)
    # A direct algorithm, whatever the environment says: it adds in rank order, as the paths do.
    communicator = fa.Communicator.init(nranks, rank, unique_id, algorithm="two-shot-pull")
    vector = gradient(seed, rank, count)
    k = min(max(math.floor(count * density + 0.5), 1), count)
    digests = {}
    for name, (select, reduce, promise) in PATHS.items():
        kept, output = select(vector, k), torch.zeros(count)
        reduce(communicator, kept, k, output)
        # What the judge needs comes to it by gathers of their own.
        lengths = gather_lengths(communicator, kept[0].numel())
        indexes, values = (gather_v(communicator, part, lengths) for part in kept)
        everybody = [(one.numpy(), other.numpy()) for one, other in zip(indexes, values)]
        expected = promised(promise, everybody, k, count)
        wrong = int((output.numpy().view(np.uint32) != expected.view(np.uint32)).sum())
        if wrong:
            raise AssertionError(f"{name}: {wrong} elements of rank {rank} are not what is promised")
        digests[name] = (digest(output.numpy()), sum(lengths) // nranks)
    communicator.destroy()
    return digests if rank == 0 else None


def _printed(rank, nranks, unique_id, *arguments):
    digests = rank_of_all(rank, nranks, fa.UniqueId(unique_id), *arguments)
    for name, (value, kept) in (digests or {}).items():
        print(f"{name:>18} {kept:>10} kept {value:016x}  as promised")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    unique_id, context = bytes(fa.get_unique_id()), multiprocessing.get_context("spawn")
    rest = (given.ranks, unique_id, given.count, given.density, given.seed)
    processes = [context.Process(target=_printed, args=(rank, *rest)) for rank in range(given.ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    raise SystemExit(max(abs(process.exitcode or 0) for process in processes))


if __name__ == "__main__":
    main()
