// The typed loops of integers.
#include "typed.hpp"

namespace FA_NAMESPACE {

#define FA_LOOPS_floats(name, element)
#define FA_LOOPS_integers(name, element) FA_LOOPS(name, element)
FA_TYPES(FA_LOOPS_OF_FAMILY, )

} // namespace FA_NAMESPACE
