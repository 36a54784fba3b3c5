// Stands in for torch/extension.h where DeepSpeed's shm.cpp is compiled: the tensor, without Python.
#pragma once

#include <ATen/ATen.h>

namespace torch {
using at::Tensor;
}
