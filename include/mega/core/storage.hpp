/// @file  What parameters and activations may be stored as.
#pragma once
#include <mega/core/bfloat16.hpp>
#include <mega/core/float16.hpp>

#include <concepts>

namespace mega::inline v0 {

/// Of 16 bits: tensor cores multiply them and add in float.
template <class T>
concept half_storage = std::same_as<T, Bfloat16> || std::same_as<T, Float16>;

/// Sums, statistics and gradients of parameters are float whatever the storage.
template <class T>
concept storage = std::same_as<T, float> || half_storage<T>;

}  // namespace mega::inline v0
