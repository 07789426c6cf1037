/// @file  Slow link: the transfer itself takes longer than equal ones elsewhere. Of a matched
/// operation's members the last to arrive waits for nobody, so the shortest span is the transfer;
/// but of a message whose sender waits for no receiver it is the sender's span.
#pragma once
#include <mega/core/error.hpp>
#include <mega/scan/match.hpp>
#include <mega/scan/trace.hpp>
#include <mega/scan/verdict.hpp>
#include <mega/scan/verdicts/figures.hpp>
#include <mega/scan/verdicts/job_layout.hpp>
#include <mega/scan/verdicts/onset.hpp>
#include <mega/scan/verdicts/robust.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace mega::inline v0::scan::verdicts {

class SlowLinkSearch {
 public:
  SlowLinkSearch(const Trace& trace, const Matches& matches, const JobLayout& job,
                 const DiagnoseOptions& options)
      : t_(trace), matches_(matches), job_(job), o_(options) {}

  std::vector<Verdict> run(std::vector<std::string>& notes) {
    std::vector<Transfer> transfers;
    std::vector<Channel> channels;
    std::map<std::vector<std::int32_t>, std::size_t> index;
    std::vector<std::int32_t> who;
    const bool senders_wait = !sends_end_early();
    for (const Instance& i : matches_.instances) {
      who.clear();
      Nanoseconds shortest = std::numeric_limits<Nanoseconds>::max();
      const Event* any = nullptr;
      std::int64_t bytes = 0;
      for (const TableIndex c : matches_.of(i)) {
        const Event& e = t_.events[t_.communications[c].event];
        who.push_back(t_.rank(e));
        shortest = std::min(shortest, e.duration());
        bytes = std::max(bytes, t_.communications[c].bytes);
        any = &e;
      }
      const std::size_t step = job_.step_index(any->step);
      const Event* const send = senders_wait ? nullptr : sender_of(i);
      if (send != nullptr) any = send, shortest = send->duration();
      if (shortest <= 0 || step == JobLayout::no_step) continue;
      if (i.group != none && i.count < t_.groups[i.group].ranks.size()) continue;
      std::sort(who.begin(), who.end());
      const auto [at, is_new] = index.try_emplace(who, channels.size());
      if (is_new) {
        Channel made;
        made.ranks = who;
        channels.push_back(std::move(made));
      }
      channels[at->second].pair = channels[at->second].pair || i.op == CommunicationOp::send_recv;
      transfers.push_back({{i.op, i.count, bytes, any->name},
                           at->second,
                           step,
                           std::log(static_cast<double>(shortest)),
                           send != nullptr});
    }
    std::sort(transfers.begin(), transfers.end(), [](const Transfer& a, const Transfer& b) {
      return std::tie(a.kind, a.channel, a.step) < std::tie(b.kind, b.channel, b.step);
    });
    trust_larger(transfers);
    std::vector<double> of_channel, of_class;
    for (std::size_t i = 0; i < transfers.size();) {
      std::size_t end = i;
      of_class.clear();
      while (end < transfers.size() && transfers[end].kind == transfers[i].kind) {
        const std::size_t channel = transfers[end].channel;
        of_channel.clear();
        for (; end < transfers.size() && transfers[end].kind == transfers[i].kind &&
               transfers[end].channel == channel;
             ++end)
          of_channel.push_back(transfers[end].log);
        // So a fault that began in the window leaves the standard alone, too.
        of_class.push_back(undisturbed(of_channel));
      }
      const double standard = lower_median(of_class);
      // What is shorter is latency. A sender's own is compared, too, where it is that of no short
      // transfer any more.
      const double beyond = std::log(static_cast<double>(o_.short_transfer)) - standard;
      if (of_class.size() > 1 && (beyond < 0 || transfers[i].own_span))
        judge(channels, {&transfers[i], &transfers[end - 1] + 1}, standard,
              std::log(o_.slow_link) + std::max(0.0, beyond));
      i = end;
    }
    std::vector<std::size_t> slow;
    for (std::size_t k = 0; k < channels.size(); ++k) {
      Channel& c = channels[k];
      c.slow = !c.onsets.empty() && c.onsets.size() * 2 >= c.kinds;
      if (!c.slow) continue;
      slow.push_back(k);
      std::vector<double> levels;
      for (const Onset& o : c.onsets) {
        levels.push_back(o.level);
        c.first = std::min(c.first, o.first);
      }
      c.excess = lower_median(levels);
    }
    blame_links(channels, std::move(slow));
    // As many slow links as that are none: what should be equal is not.
    const std::size_t found = found_.size();
    if (found < 3 || found * 4 < job_.ranks()) return std::move(found_);
    found_.clear();
    notes.push_back(sentence("equal transfers take unequal times in ", found,
                             " places, so that none of them is a standard for the others"));
    return std::move(found_);
  }

 private:
  /// Equal operations of equal groups are peers: operation, members, bytes, name.
  using Class = std::tuple<CommunicationOp, std::size_t, std::int64_t, TableIndex>;
  struct Transfer {
    Class kind;
    std::size_t channel;
    std::size_t step;
    double log;
    bool own_span;  // of the sender, that waits for nobody
  };
  struct Channel {
    std::vector<std::int32_t> ranks;  // global
    bool pair = false;
    std::size_t kinds = 0;      // of transfers, that can be judged
    std::vector<Onset> onsets;  // of those kinds that are slow
    double excess = 0;          // log of the factor
    std::size_t first = ~std::size_t{0};
    double time = 0;  // ns in excess
    bool slow = false;
  };

  /// The send of a message between two ranks; null where it is none.
  [[nodiscard]] const Event* sender_of(const Instance& i) const {
    if (i.op != CommunicationOp::send_recv || i.count != 2) return nullptr;
    for (const TableIndex c : matches_.of(i)) {
      if (t_.communications[c].op == CommunicationOp::send)
        return &t_.events[t_.communications[c].event];
    }
    return nullptr;
  }

  /// Whether messages are left behind for their receivers, as threads do it, so that some sends end
  /// before their receives begin: in one of twenty at least, by clocks that are the same. NCCL's
  /// and other large messages need both ends at a time.
  [[nodiscard]] bool sends_end_early() const {
    std::size_t messages = 0, early = 0;
    for (const Instance& i : matches_.instances) {
      const Event* const send = sender_of(i);
      if (send == nullptr) continue;
      for (const TableIndex c : matches_.of(i)) {
        const Event& receive = t_.events[t_.communications[c].event];
        const std::string& clock = t_.ranks[t_.rank_index(receive)].clock;
        if (&receive == send || clock.empty() || clock != t_.ranks[t_.rank_index(*send)].clock)
          continue;
        ++messages;
        early += receive.begin >= send->end ? 1 : 0;
      }
    }
    return early > 0 && early * 20 >= messages;
  }

  /// What has carried more in less time in the same step can carry this so. Buffers that are cold,
  /// members that wake up late and whatever else is met by one operation of a step and not by the
  /// next are no property of what is between them. @pre  sorted by kind
  static void trust_larger(std::vector<Transfer>& transfers) {
    std::map<std::tuple<CommunicationOp, std::size_t, std::size_t, std::size_t>, double> least;
    for (auto t = transfers.rbegin(); t != transfers.rend(); ++t) {
      const auto& [op, members, bytes, name] = t->kind;
      const auto [at, is_new] = least.try_emplace({op, members, t->channel, t->step}, t->log);
      at->second = t->log = std::min(at->second, t->log);
    }
  }

  /// One kind of transfers, of which the channels are peers.
  /// @param standard  logarithm of what one takes  @param limit  above it, that is slow
  /// @pre  sorted by channel and step
  void judge(std::vector<Channel>& channels, std::span<const Transfer> transfers, double standard,
             double limit) const {
    Figures figures;
    std::vector<std::size_t> who;
    std::vector<double> logs;
    for (std::size_t i = 0; i < transfers.size();) {
      const std::size_t channel = transfers[i].channel, step = transfers[i].step;
      logs.clear();
      for (; i < transfers.size() && transfers[i].channel == channel && transfers[i].step == step;
           ++i)
        logs.push_back(transfers[i].log - standard);
      if (who.empty() || who.back() != channel) {
        who.push_back(channel);
        figures.emplace_back(job_.steps.size());
      }
      const auto count = static_cast<double>(logs.size());
      const double log = undisturbed(logs);
      figures.back()[step] = log;
      channels[channel].time += count * std::exp(standard) * (std::exp(log) - 1);
    }
    const std::vector<Onset> onsets = find_outliers(figures, limit);
    for (std::size_t k = 0; k < who.size(); ++k) {
      Channel& c = channels[who[k]];
      ++c.kinds;
      if (onsets[k].lasts()) c.onsets.push_back(onsets[k]);
    }
  }

  /// A rank nearly all of whose channels are slow explains them; what is left are single links.
  void blame_links(const std::vector<Channel>& channels, std::vector<std::size_t> left) {
    struct Record {
      std::size_t slow = 0, healthy = 0;
    };
    std::map<std::int32_t, Record> records;
    for (const Channel& c : channels) {
      if (c.kinds == 0) continue;
      for (const std::int32_t rank : c.ranks)
        ++(c.slow ? records[rank].slow : records[rank].healthy);
    }
    while (!left.empty()) {
      std::map<std::int32_t, std::vector<std::size_t>> unexplained;
      for (const std::size_t k : left) {
        for (const std::int32_t rank : channels[k].ranks) unexplained[rank].push_back(k);
      }
      std::int32_t best = -1;
      std::tuple<std::size_t, double, double> most;
      for (const auto& [rank, own] : unexplained) {
        const Record& record = records[rank];
        const double share =
            static_cast<double>(record.slow) / static_cast<double>(record.slow + record.healthy);
        // One pair speaks for itself. A group does not, but a channel that is explained already may
        // be this rank's fault too.
        const bool says_little = own.size() == 1 && (channels[own[0]].pair || record.slow < 2);
        if (share <= 0.66 || says_little) continue;
        // Of two that explain as much, the one whose channels are slow alike: what keeps a rank's
        // transfers to a tenth of the speed in one does not keep them to half of it in another.
        const auto agreement = -spread_of(channels, own);
        if (best < 0 || std::tuple(own.size(), share, agreement) > most) {
          most = {own.size(), share, agreement};
          best = rank;
        }
      }
      const std::vector<std::size_t> explained =
          best >= 0 ? unexplained[best] : std::vector<std::size_t>{left.front()};
      add_link(channels, explained, best);
      std::erase_if(left, [&](std::size_t k) {
        return std::find(explained.begin(), explained.end(), k) != explained.end();
      });
    }
  }

  /// Between the least and the most excess of some channels.
  [[nodiscard]] static double spread_of(const std::vector<Channel>& channels,
                                        const std::vector<std::size_t>& which) {
    const auto [least, most] = std::minmax_element(
        which.begin(), which.end(),
        [&](std::size_t a, std::size_t b) { return channels[a].excess < channels[b].excess; });
    return channels[*most].excess - channels[*least].excess;
  }

  void add_link(const std::vector<Channel>& channels, const std::vector<std::size_t>& explained,
                std::int32_t rank) {
    Verdict v;
    const Channel& any = channels[explained.front()];
    v.what = VerdictClass::slow_link;
    v.ranks = rank >= 0 ? std::vector<std::int32_t>{rank} : any.ranks;
    double excess = any.excess, time = 0;
    std::size_t first = any.first;
    for (const std::size_t k : explained) {
      excess = std::min(excess, channels[k].excess);
      first = std::min(first, channels[k].first);
      time += channels[k].time / static_cast<double>(std::max<std::size_t>(1, job_.steps.size()));
    }
    v.factor = std::exp(excess);
    v.since_step = job_.steps[first];
    v.cost_per_step = static_cast<Nanoseconds>(time);
    v.confidence =
        rank >= 0 || any.ranks.size() == 2 ? 0.95 : 1.0 / static_cast<double>(any.ranks.size());
    std::string who;
    for (const std::int32_t r : any.ranks) who += sentence(who.empty() ? "" : ", ", r);
    v.evidence.push_back(
        rank >= 0 ? sentence("all transfers of rank ", rank, ", in ", explained.size(),
                             " groups and pairs, take at least ", figure(v.factor),
                             " times as long as equal ones elsewhere")
                  : sentence("transfers between ranks ", who, " take ", figure(v.factor),
                             " times as long as equal ones elsewhere; other transfers of these "
                             "ranks do not"));
    v.evidence.push_back(sentence("that is ", milliseconds(time), " of transfer a step more"));
    found_.push_back(std::move(v));
  }

  const Trace& t_;
  const Matches& matches_;
  const JobLayout& job_;
  const DiagnoseOptions& o_;
  std::vector<Verdict> found_;
};

/// @param notes  gets a sentence where equal transfers are so unequal that none is a standard
[[nodiscard]] inline std::vector<Verdict> find_slow_links(const Trace& trace,
                                                          const Matches& matches,
                                                          const JobLayout& job,
                                                          const DiagnoseOptions& options,
                                                          std::vector<std::string>& notes) {
  return SlowLinkSearch(trace, matches, job, options).run(notes);
}

}  // namespace mega::inline v0::scan::verdicts
