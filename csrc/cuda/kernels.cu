// All families of kernels in one file, for tools that read one PTX file. A build compiles each family
// separately.
#include "any_world.cu"
#include "hot_set.cu"
#include "norms.cu"
#include "others.cu"
