/// @file  Two programs that run in turn, compared by neighbouring blocks.
#pragma once
#include <cmath>
#include <cstddef>
#include <vector>

namespace gpu_step {

/// A mean and the interval that holds the true one in 95 of 100 experiments.
struct MeanInterval {
  double mean = 0, low = 0, high = 0;
};

/// The quantile 0.975 of Student's t, to 0.1 % from 7 degrees of freedom on: the expansion of
/// Fisher and Cornish around that of the normal distribution.
[[nodiscard]] inline double student_t_975(std::size_t degrees) {
  const double n = static_cast<double>(degrees), z = 1.959963985, z2 = z * z;
  return z * (1 + (z2 + 1) / (4 * n) + ((5 * z2 + 16) * z2 + 3) / (96 * n * n) +
              (((3 * z2 + 19) * z2 + 17) * z2 - 15) / (384 * n * n * n));
}

/// Of a[i] / b[i], which are independent and near normal. @pre  equally many, at least 8
[[nodiscard]] inline MeanInterval mean_ratio(const std::vector<double>& a,
                                             const std::vector<double>& b) {
  const auto n = static_cast<double>(a.size());
  double sum = 0, squares = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] / b[i];
  const double mean = sum / n;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double off = a[i] / b[i] - mean;
    squares += off * off;
  }
  const double reach = student_t_975(a.size() - 1) * std::sqrt(squares / (n - 1) / n);
  return {mean, mean - reach, mean + reach};
}

}  // namespace gpu_step
