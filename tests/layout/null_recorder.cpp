// A stage's call through Context with a NullRecorder is the call without any recorder: no span
// adds an instruction, a hook set of Null models adds no byte, and a step is not announced.
#include <mega/core/context.hpp>
#include <mega/core/hooks.hpp>

struct Stream {};
extern "C" void work(Stream&, float*);
extern "C" void more_work(Stream&, float*);

#if MEGA_BARE
struct Held {
  int value;
};
extern "C" int subject(Stream& stream, float* values, Held& held) {
  work(stream, values);
  more_work(stream, values);
  return held.value + static_cast<int>(sizeof(Held));
}
#else
struct Held {
  [[no_unique_address]] mega::Hooks<> hooks;
  int value;
};
extern "C" int subject(Stream& stream, float* values, Held& held) {
  mega::begin_step(held.hooks.recorder, 3);
  mega::name_stream(held.hooks.recorder, stream, "compute");
  const mega::ScopedSpan whole(
      held.hooks.recorder, stream,
      mega::SpanInfo{.name = "forward", .chunk = 1, .kind = mega::SpanKind::forward});
  {
    const mega::ScopedSpan span(held.hooks.recorder, stream, mega::SpanInfo{.name = "work"});
    work(stream, values);
  }
  const mega::ScopedSpan span(held.hooks.recorder, stream,
                              mega::SpanInfo{.name = "all_reduce",
                                             .bytes = 12,
                                             .kind = mega::SpanKind::communication,
                                             .group = 1,
                                             .sequence = 7,
                                             .dtype = "float32"});
  more_work(stream, values);
  return held.value + static_cast<int>(sizeof(Held));
}
#endif
