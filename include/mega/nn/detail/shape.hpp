/// @file  Checks of operand shapes, made by the caller's thread before work is queued.
#pragma once
#include <mega/core/error.hpp>
#include <mega/core/view.hpp>

#include <string_view>

namespace mega::inline v0::nn::detail {

template <class T>
void expects_shape(std::string_view op, std::string_view name, Matrix<T> m, Index rows,
                   Index cols) {
  expects(m.rows() == rows && m.cols() == cols, ErrorCode::logic, [&] {
    return sentence(op, ": ", name, " is ", m.rows(), " x ", m.cols(), ", it must be ", rows, " x ",
                    cols);
  });
}

template <class T>
void expects_size(std::string_view op, std::string_view name, Vector<T> v, Index size) {
  expects(v.size() == size, ErrorCode::logic, [&] {
    return sentence(op, ": ", name, " has ", v.size(), " elements, it must have ", size);
  });
}

}  // namespace mega::inline v0::nn::detail
