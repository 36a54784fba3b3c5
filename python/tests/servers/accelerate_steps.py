"""Trains a model with accelerate on two CPU ranks over this backend, and compares its weights with those of one rank.

`scripts/test-transformers.sh` runs it by torchrun. accelerate's choice for CPUs is gloo. It keeps a process group that
the program has made. Each rank also trains a copy alone, on the batches of all ranks: the weights are the same except
for rounding.
"""

import copy

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

SAMPLES, FEATURES, CLASSES, BATCH, EPOCHS = 64, 32, 5, 4, 3


def train(model, optimizer, batches, backward):
    for _ in range(EPOCHS):
        for features, labels in batches:
            optimizer.zero_grad()
            backward(cross_entropy(model(features), labels))
            optimizer.step()


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def main():
    torch.set_num_threads(1)
    torch.manual_seed(3)
    data = TensorDataset(torch.randn(SAMPLES, FEATURES), torch.randint(CLASSES, (SAMPLES,)))
    model = torch.nn.Sequential(torch.nn.Linear(FEATURES, 64), torch.nn.Tanh(), torch.nn.Linear(64, CLASSES))
    alone, before = copy.deepcopy(model), copy.deepcopy(model)

    dist.init_process_group("fast_allreduce")
    accelerator = Accelerator(cpu=True)
    assert dist.get_backend() == "fast_allreduce" and accelerator.num_processes == dist.get_world_size() == 2
    parallel, optimizer, batches = accelerator.prepare(model, optimizer_of(model), DataLoader(data, BATCH))
    assert isinstance(parallel, torch.nn.parallel.DistributedDataParallel), type(parallel)
    train(parallel, optimizer, batches, accelerator.backward)
    train(alone, optimizer_of(alone), DataLoader(data, 2 * BATCH), torch.Tensor.backward)

    trained = dict(accelerator.unwrap_model(parallel).named_parameters())
    for name, expected in alone.named_parameters():
        torch.testing.assert_close(trained[name], expected, rtol=1e-4, atol=1e-5)
        # The ranks have the same bits.
        both = accelerator.gather(trained[name].detach()[None])
        assert both.shape[0] == 2 and torch.equal(both[0], both[1]), name
        assert not torch.allclose(dict(before.named_parameters())[name], expected, rtol=0.05), f"{name} was not trained"

    rank = accelerator.process_index
    assert accelerator.reduce(torch.tensor([rank + 1.0]), "mean").item() == 1.5
    assert gather_object([f"rank {rank}"]) == ["rank 0", "rank 1"]
    accelerator.wait_for_everyone()
    accelerator.print(f"accelerate: {EPOCHS * len(batches)} steps on 2 ranks, the weights of one rank")
    # Destroys the process group as well.
    accelerator.end_training()


if __name__ == "__main__":
    main()
