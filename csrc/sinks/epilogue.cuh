// Epilogues: what is done with a result on its way into a sink. A protocol takes one as a template parameter.
//
// What an epilogue has to have. partition(), which divides the message so that each block has all that it
// needs at once: packs, or whole rows. into(), which wraps the sink that the protocol stores or sends a
// result by: a result that is gathered from its owner has been through the epilogue there, once.
#pragma once

#include "../core/pack.cuh"

namespace FA_NAMESPACE {

// Nothing is done with a result.
struct Plain {
  template <class Reduce>
  static FA_FN auto partition(const FaLaunch &, const Reduce &reduce) {
    return reduce.partition();
  }

  template <class Sink>
  static FA_FN Sink into(const FaLaunch &, const Sink &sink) {
    return sink;
  }
};

} // namespace FA_NAMESPACE
