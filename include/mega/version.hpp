/// @file  Version of the library and the ABI tag of its inline namespace.
#pragma once

#define MEGA_VERSION_MAJOR 0
#define MEGA_VERSION_MINOR 1
#define MEGA_VERSION_PATCH 0
