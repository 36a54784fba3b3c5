// A rank that measures oneCCL's allreduce between CPUs; see rank.hpp.
#include <oneapi/ccl.hpp>

#include "rank.hpp"

namespace {

std::string to_text(const ccl::kvs::address_type &address) {
  std::string text;
  char digits[3];
  for (char byte : address) {
    snprintf(digits, sizeof digits, "%02x", unsigned(static_cast<unsigned char>(byte)));
    text += digits;
  }
  return text;
}

ccl::kvs::address_type from_text(const std::string &text) {
  ccl::kvs::address_type address{};
  if (text.size() != 2 * address.size())
    peers::fail("the address of rank 0 is malformed");
  for (size_t i = 0; i < address.size(); i++)
    address[i] = char(strtoul(text.substr(2 * i, 2).c_str(), nullptr, 16));
  return address;
}

} // namespace

int main() {
  peers::Rank rank(atoi(peers::variable("PEERS_RANK").c_str()));
  ccl::init();
  ccl::shared_ptr_class<ccl::kvs> store;
  if (rank.rank == 0) {
    store = ccl::create_main_kvs();
    rank.say("share " + to_text(store->get_address()));
  } else {
    std::string address;
    if (!rank.line(address))
      peers::fail("rank 0 shared nothing");
    store = ccl::create_kvs(from_text(address));
  }
  const auto communicator = ccl::create_communicator(rank.ranks, rank.rank, store);
  const auto version = ccl::get_library_version();
  rank.say("ready oneCCL " + std::to_string(version.major) + "." + std::to_string(version.minor) + "." +
           std::to_string(version.update));
  rank.serve([&](const float *in, float *out, size_t count) {
    ccl::allreduce(in, out, count, ccl::datatype::float32, ccl::reduction::sum, communicator).wait();
  });
}
