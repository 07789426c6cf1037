// An order of separate input and weight gradients is refused to a stage with a whole backward only.
#include <mega/dpp/zero_bubble.hpp>
#include <mega/mega.hpp>

#include <vector>

struct Whole : mega::UniformStage {
  struct saved_type {};
  saved_type make_saved(mega::Arena&) const { return {}; }
  std::vector<mega::Parameter> parameters() const { return {}; }
  void forward(auto&, mega::Matrix<const float>, mega::Matrix<float>, saved_type&) {}
  void backward(auto&, mega::Matrix<const float>, mega::Matrix<float>, saved_type&) {}
  void loss(auto&, mega::Matrix<float>, mega::Matrix<const float>) {}
};

template <class Traversal>
struct Plan : mega::DefaultPlan {
  using stage = Whole;
  using traversal = Traversal;
};

using mega::dpp::FullBackward;
using mega::dpp::ZeroBubbleH1;

void explain() {
#if MEGA_TWIN
  mega::explain<Plan<FullBackward<ZeroBubbleH1>>>();
#else
  // mega-expect: "mega: the plan's traversal splits the backward, and the stage lacks"
  mega::explain<Plan<ZeroBubbleH1>>();
#endif
}
