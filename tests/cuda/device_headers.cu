// All device headers in one source, through nvcc.
#include <mega/device.cuh>
#include <mega/mega.hpp>

static_assert(mega::device_policy<mega::Cuda>);
