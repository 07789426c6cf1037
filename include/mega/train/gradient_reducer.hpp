/// @file  Sums gradients over tied stages and data-parallel ranks as soon as a chunk's are
/// complete.
#pragma once
#include <mega/comm/concepts.hpp>
#include <mega/core/device.hpp>
#include <mega/core/view.hpp>
#include <mega/optim/adamw.hpp>
#include <mega/train/groups.hpp>
#include <mega/train/parameter_store.hpp>

namespace mega::inline v0::train {

/// The gradient sink of the executor. Sums in this order, each along the canonical tree:
/// micro-batches (done by the stage), tied copies, tensor ranks of partial gradients, data ranks.
/// Tied copies and partial gradients are summed before data ranks: a sharded reduction would
/// otherwise add pieces of different tensors.
template <device_policy Device, class Comm, class Store>
class GradientReducer {
  using stream_type = typename Device::stream_type;

 public:
  /// Everything passed in must outlive the reducer. `transfer` is the stream of the collectives.
  GradientReducer(Device& device, Store& store, Groups<Comm>& groups, stream_type& transfer)
      : store_(store), groups_(groups), transfer_(transfer), complete_(device.make_event()) {}

  /// Afterwards, on `transfer`: the chunk's gradients, summed; with a sharded optimizer only this
  /// rank's piece of them.
  void reduce(stream_type& compute, int chunk) {
    const Region& region = store_.table().regions()[static_cast<std::size_t>(chunk)];
    const Vector<float> gradients = store_.gradients();
    // On the compute stream, because the stages use the tensor communicator there.
    if (region.partial_end > region.begin) {
      groups_.tensor.all_reduce(compute,
                                gradients.slice(region.begin, region.partial_end - region.begin),
                                comm::Reduce::sum);
    }
    order_after(compute);
    const Vector<float> whole = gradients.slice(region.begin, region.size());
    if (store_.shards_optimizer()) {
      const Range own = store_.table().piece(region, store_.table().position().data);
      groups_.data.reduce_scatter(transfer_, gradients.slice(own.begin, own.size()),
                                  Vector<const float>(whole), comm::Reduce::sum);
    } else {
      groups_.data.all_reduce(transfer_, whole, comm::Reduce::sum);
    }
  }

  /// Owner's accumulator plus the tied copy's, on both ranks or on the one that holds both.
  void tied_reduce(stream_type& compute) {
    order_after(compute);
    for (const TableEntry& tied : store_.table().entries()) {
      if (!tied.alias) continue;
      const TableEntry& owner = *store_.table().find_owner(tied);
      accumulate(store_.gradients(owner), store_.gradients(tied));
    }
    if (groups_.tied.size() == 1) return;
    for (const TableEntry& entry : store_.table().entries()) {
      if (is_tied_owner(entry) || !entry.parameter.tied_to.empty()) {
        groups_.tied.all_reduce(transfer_, store_.gradients(entry), comm::Reduce::sum);
      }
    }
  }

 private:
  void order_after(stream_type& compute) {
    compute.record(complete_);
    transfer_.wait(complete_);
  }

  void accumulate(Vector<float> inout, Vector<const float> values) {
    using optim::accumulate;
    accumulate(transfer_, inout, values);
  }

  [[nodiscard]] bool is_tied_owner(const TableEntry& entry) const {
    return store_.table().ties_lead_to(entry.parameter.name);
  }

  Store& store_;
  Groups<Comm>& groups_;
  stream_type& transfer_;
  typename stream_type::event_type complete_;
};

}  // namespace mega::inline v0::train
