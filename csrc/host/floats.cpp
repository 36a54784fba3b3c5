// The typed loops of floats.
#include "typed.hpp"

namespace FA_NAMESPACE {

#define FA_LOOPS_floats(name, element) FA_LOOPS(name, element)
#define FA_LOOPS_integers(name, element)
FA_TYPES(FA_LOOPS_OF_FAMILY, )

} // namespace FA_NAMESPACE
