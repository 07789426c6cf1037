#include <mega/scan/nvml.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <string>
#include <utility>

using mega::scan::ClockLimit;
using mega::scan::DeviceState;
using mega::scan::NvmlDevice;
using mega::scan::NvmlFunctions;

namespace {

/// A management library that counts who has it open, and answers as it is told.
struct Library {
  int open = 0, shut = 0;
  int init_status = 0, find_status = 0, clock_status = 0, other_status = 0;
  unsigned int mhz = 1980;
  std::string asked_for;
  int device = 0;
};
Library library;

NvmlFunctions functions() {
  NvmlFunctions f;
  f.init = [] {
    library.open += library.init_status == 0 ? 1 : 0;
    return library.init_status;
  };
  f.shutdown = [] { return ++library.shut, --library.open, 0; };
  f.device_by_pci_bus_id = [](const char* bus, void** device) {
    library.asked_for = bus;
    *device = &library.device;
    return library.find_status;
  };
  f.clock_info = [](void* device, int clock, unsigned int* mhz) {
    REQUIRE(device == &library.device);
    REQUIRE(clock == 1);
    *mhz = library.mhz;
    return library.clock_status;
  };
  f.temperature = [](void*, int sensor, unsigned int* celsius) {
    REQUIRE(sensor == 0);
    *celsius = 61;
    return library.other_status;
  };
  f.utilisation_rates = [](void*, NvmlFunctions::Utilisation* rates) {
    *rates = {99, 45};
    return library.other_status;
  };
  f.power_usage = [](void*, unsigned int* milliwatts) {
    *milliwatts = 645'000;
    return library.other_status;
  };
  f.clock_event_reasons = [](void*, unsigned long long* bits) {
    *bits = 0xFF00'0000'0024ULL;
    return library.other_status;
  };
  return f;
}

}  // namespace

TEST_CASE("scan: NVML is asked for the device of a bus address") {
  library = {};
  {
    const NvmlDevice device("0000:1B:00.0", functions());
    REQUIRE(device);
    CHECK(library.asked_for == "0000:1B:00.0");
    CHECK(library.open == 1);
    const auto state = device.state(77);
    REQUIRE(state);
    CHECK(state->at == 77);
    CHECK(state->rank == mega::scan::none);
    CHECK(state->sm_mhz == 1980);
    CHECK(state->temperature_c == 61);
    CHECK(state->busy_percent == 99);
    CHECK(state->power_mw == 645'000);
    CHECK(state->clock_limits == (static_cast<std::uint32_t>(ClockLimit::power_cap) |
                                  static_cast<std::uint32_t>(ClockLimit::heat)));
  }
  CHECK(library.open == 0);
}

TEST_CASE("scan: what NVML does not say is left out") {
  library = {};
  library.clock_status = 3;  // not supported
  {
    const NvmlDevice device("0", functions());
    const auto state = device.state(1);
    REQUIRE(state);
    CHECK(state->sm_mhz == -1);
    CHECK(state->temperature_c == 61);
    library.clock_status = 0;
    library.other_status = 15;  // the GPU is lost
    CHECK(device.state(1)->sm_mhz == 1980);
    CHECK(device.state(1)->temperature_c == -1);
    CHECK(device.state(1)->power_mw == -1);
    CHECK(device.state(1)->busy_percent == -1);
    CHECK(device.state(1)->clock_limits == 0);
    library.mhz = 0xFFFF'FFFF;  // no clock of this world
    CHECK(device.state(1)->sm_mhz == -1);
    library.clock_status = 15;
    CHECK_FALSE(device.state(1));
  }
  NvmlFunctions few = functions();
  few.clock_info = nullptr;
  few.temperature = nullptr;
  few.utilisation_rates = nullptr;
  few.clock_event_reasons = nullptr;
  library.other_status = 0;
  const auto state = NvmlDevice("0", few).state(1);
  REQUIRE(state);
  CHECK(state->sm_mhz == -1);
  CHECK(state->power_mw == 645'000);
  few.power_usage = nullptr;
  CHECK_FALSE(NvmlDevice("0", few).state(1));
  CHECK(library.open == 0);
}

TEST_CASE("scan: without NVML, or without the device, nothing is said and nothing stays open") {
  CHECK_FALSE(NvmlDevice());
  CHECK_FALSE(NvmlDevice().state(1));
  CHECK_FALSE(NvmlDevice("0", "libmega-there-is-no-such-library.so"));
  CHECK_FALSE(NvmlDevice("0", NvmlFunctions{}));
  // A library that is something else.
  const NvmlDevice other("0", "libc.so.6");
  CHECK_FALSE(other);
  CHECK_FALSE(other.state(1));

  library = {};
  library.init_status = 9;  // no driver
  CHECK_FALSE(NvmlDevice("0", functions()));
  CHECK(library.open == 0);
  CHECK(library.shut == 0);
  library = {};
  library.find_status = 6;  // not found
  CHECK_FALSE(NvmlDevice("0", functions()));
  CHECK(library.open == 0);
  CHECK(library.shut == 1);
}

TEST_CASE("scan: a moved device is shut once") {
  library = {};
  {
    NvmlDevice kept;
    {
      NvmlDevice made("0", functions());
      kept = std::move(made);
    }
    CHECK(library.open == 1);
    const NvmlDevice last = std::move(kept);
    CHECK(last.state(1)->sm_mhz == 1980);
  }
  CHECK(library.open == 0);
  CHECK(library.shut == 1);
}
