/// @file  What the library asks of small objects that it moves and copies.
/// The concepts of the standard library with these names also look for a swap. That look costs
/// more to compile than a policy does, and the library swaps nothing that it was handed.
#pragma once
#include <type_traits>

namespace mega::inline v0 {

/// Streams, events, blocks of memory, communicators: handles that may change their place.
template <class T>
concept movable =
    std::is_object_v<T> && std::is_move_constructible_v<T> && std::is_move_assignable_v<T>;

/// Policies: values that can be made from nothing and copied.
template <class T>
concept semiregular = movable<T> && std::is_default_constructible_v<T> &&
    std::is_copy_constructible_v<T> && std::is_copy_assignable_v<T>;

}  // namespace mega::inline v0
