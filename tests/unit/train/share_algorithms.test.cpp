// Sharing algorithms: after it all ranks hold one table, whatever each held before. Also the text
// that an agreement carries.
#include <mega/comm/self.hpp>
#include <mega/comm/thread.hpp>
#include <mega/core/error.hpp>
#include <mega/host/host.hpp>
#include <mega/host/host_async.hpp>
#include <mega/train/agreement.hpp>
#include <mega/train/share_algorithms.hpp>

#include <doctest/doctest.h>

#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

using mega::Error;
using mega::ErrorCode;
using mega::comm::run_threads;
using mega::comm::ThreadComm;
using mega::train::Agreement;
using mega::train::share_algorithms;

namespace {

/// Problems and choices as nn::MatmulAlgorithms writes them, of one version of the library.
class Table {
 public:
  Table() = default;
  Table(std::string version, std::map<std::string, std::string> choices)
      : version_(std::move(version)) {
    for (const auto& [problem, choice] : choices) known_[version_ + ' ' + problem] = choice;
  }

  [[nodiscard]] std::string text() const {
    std::string out;
    for (const auto& [problem, choice] : known_) out += problem + ' ' + choice + '\n';
    return out;
  }
  void read(std::string_view text) {
    ++reads_;
    std::map<std::string, std::string> in;
    while (!text.empty()) {
      const std::string_view line = text.substr(0, text.find('\n'));
      text.remove_prefix(line.size() + 1);
      mega::expects(line.starts_with(version_ + ' '), ErrorCode::bad_input,
                    [&] { return mega::sentence("this is ", version_, ", not ", line); });
      in[std::string(line.substr(0, line.rfind(' ')))] = line.substr(line.rfind(' ') + 1);
    }
    for (const auto& [problem, choice] : in) known_[problem] = choice;
  }
  [[nodiscard]] int reads() const { return reads_; }

 private:
  std::string version_ = "1";
  std::map<std::string, std::string> known_;
  int reads_ = 0;
};

/// Each rank's table after all have shared theirs.
template <class Device = mega::Host>
void share(std::vector<Table>& tables) {
  run_threads(static_cast<int>(tables.size()), [&](ThreadComm& world) {
    Device device;
    Agreement<Device, ThreadComm> agreement(device, world);
    share_algorithms(agreement, tables[static_cast<std::size_t>(world.rank())]);
  });
}
void check_all_hold(const std::vector<Table>& tables, const std::string& text) {
  for (const Table& table : tables) CHECK(table.text() == text);
}

}  // namespace

TEST_CASE_TEMPLATE("algorithms: the lowest rank that knows a problem decides it", Device,
                   mega::Host, mega::HostAsync) {
  std::vector<Table> tables = {{"1", {{"qkv 8 8", "a"}, {"up 8 32", "b"}}},
                               {"1", {{"qkv 8 8", "c"}, {"head 8 99", "d"}}},
                               {"1", {}},
                               {"1", {{"head 8 99", "e"}, {"down 32 8", "f"}, {"up 8 32", "g"}}},
                               {"1", {{"qkv 8 8", "a"}, {"up 8 32", "b"}}}};
  share<Device>(tables);
  check_all_hold(tables, "1 down 32 8 f\n1 head 8 99 d\n1 qkv 8 8 a\n1 up 8 32 b\n");

  // Once more changes nothing, and makes no stream plan anew.
  std::vector<int> reads;
  for (const Table& table : tables) reads.push_back(table.reads());
  share<Device>(tables);
  check_all_hold(tables, "1 down 32 8 f\n1 head 8 99 d\n1 qkv 8 8 a\n1 up 8 32 b\n");
  for (std::size_t r = 0; r < tables.size(); ++r) CHECK(tables[r].reads() == reads[r]);
}

TEST_CASE("algorithms: empty tables, one rank, only the last rank") {
  std::vector<Table> none(3);
  share(none);
  check_all_hold(none, "");
  for (const Table& table : none) CHECK(table.reads() == 0);

  mega::Host device;
  mega::comm::SelfComm alone;
  Agreement<mega::Host, mega::comm::SelfComm> agreement(device, alone);
  Table one("1", {{"p", "a"}});
  share_algorithms(agreement, one);
  CHECK(one.text() == "1 p a\n");

  std::vector<Table> last = {{}, {}, {"1", {{"p", "a"}}}};
  share(last);
  check_all_hold(last, "1 p a\n");
}

TEST_CASE("algorithms: a table of megabytes") {
  std::map<std::string, std::string> many, other;
  for (int i = 0; i < 9000; ++i) many["problem " + std::to_string(i)] = std::string(128, 'a');
  for (int i = 8990; i < 18000; ++i) other["problem " + std::to_string(i)] = std::string(128, 'b');
  std::map<std::string, std::string> both = other;
  for (const auto& [problem, choice] : many) both[problem] = choice;
  std::vector<Table> tables = {{"1", many}, {"1", other}, {}};
  REQUIRE(tables[0].text().size() > std::size_t{1} << 20);
  share(tables);
  check_all_hold(tables, Table("1", both).text());
}

TEST_CASE("algorithms: what a rank cannot use ends the run") {
  // Rank 1's library has another version: neither can use what the other chose.
  std::vector<Table> tables = {{"1", {{"p", "a"}}}, {"2", {{"p", "b"}}}, {"1", {}}};
  try {
    share(tables);
    FAIL("it was accepted");
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::bad_input);
    const std::string what = error.what();
    CHECK((what.find("this is 1, not 2 p b") != std::string::npos ||
           what.find("this is 2, not 1 p a") != std::string::npos));
  }
  CHECK(tables[0].text() == "1 p a\n");
  CHECK(tables[1].text() == "2 p b\n");
}

TEST_CASE_TEMPLATE("agreement: one rank's text reaches all", Device, mega::Host, mega::HostAsync) {
  // Around the size of a piece, 64 KiB, and with bytes that are no text.
  for (const std::size_t size : {std::size_t{0}, std::size_t{1}, std::size_t{65535},
                                 std::size_t{65536}, std::size_t{65537}, std::size_t{3000001}}) {
    CAPTURE(size);
    std::string expected(size, '\0');
    for (std::size_t i = 0; i < size; ++i) expected[i] = static_cast<char>(i * 2654435761U >> 13);
    for (int root = 0; root < 3; ++root) {
      std::vector<std::string> got(3);
      run_threads(3, [&](ThreadComm& world) {
        Device device;
        Agreement<Device, ThreadComm> agreement(device, world);
        CHECK(agreement.rank() == world.rank());
        CHECK(agreement.size() == 3);
        const std::string own = world.rank() == root ? expected : "not mine to say";
        got[static_cast<std::size_t>(world.rank())] = agreement.text_of(root, own);
        // The memory of numbers is the memory of texts.
        CHECK(agreement.largest(world.rank()) == 2);
      });
      for (const std::string& text : got) CHECK((text == expected));
    }
  }
}

TEST_CASE("agreement: a root that is no rank is refused") {
  CHECK_THROWS_WITH_AS(run_threads(2,
                                   [](ThreadComm& world) {
                                     mega::Host device;
                                     Agreement<mega::Host, ThreadComm> agreement(device, world);
                                     (void)agreement.text_of(2, "text");
                                   }),
                       doctest::Contains("broadcast root"), Error);
}
