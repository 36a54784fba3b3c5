// All families of kernels at once, for what looks at all of them as one PTX file. A build compiles each by
// itself.
#include "any_world.cu"
#include "hot_set.cu"
#include "norms.cu"
#include "others.cu"
