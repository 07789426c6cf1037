#include "html_page.hpp"

#include "describe.hpp"
#include "json.hpp"
#include "text.hpp"
#include <mega/core/error.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace scan_tool {

using mega::sentence;
namespace scan = mega::scan;

namespace {

/// More events make a page that browsers draw slowly.
constexpr std::size_t most_events = 120'000;
constexpr std::size_t most_groups = 24;

/// Lanes with work on a device, or all where there are none; the longest events of them.
Json timeline(const scan::Study& study, std::string& remark) {
  const scan::Trace& t = study.trace;
  bool has_device = false;
  for (const scan::Lane& lane : t.lanes) has_device |= lane.kind == scan::LaneKind::device;
  std::vector<scan::TableIndex> drawn;
  for (std::size_t i = 0; i < t.events.size(); ++i) {
    const scan::Event& e = t.events[i];
    if (!has_device || t.lanes[e.lane].kind == scan::LaneKind::device)
      drawn.push_back(static_cast<scan::TableIndex>(i));
  }
  if (drawn.size() > most_events) {
    remark = sentence("Of ", grouped(static_cast<std::int64_t>(drawn.size())),
                      " events the longest ", grouped(most_events), " are drawn.");
    std::nth_element(drawn.begin(), drawn.begin() + most_events, drawn.end(),
                     [&](scan::TableIndex a, scan::TableIndex b) {
                       return t.events[a].duration() > t.events[b].duration();
                     });
    drawn.resize(most_events);
  }
  const auto begin_of = [&](scan::TableIndex i) {
    const scan::Event& e = t.events[i];
    return study.alignment.at(t.rank_index(e), e.begin);
  };
  std::sort(drawn.begin(), drawn.end(), [&](scan::TableIndex a, scan::TableIndex b) {
    return std::pair(begin_of(a), t.events[b].end) < std::pair(begin_of(b), t.events[a].end);
  });
  const scan::Nanoseconds base = drawn.empty() ? 0 : begin_of(drawn.front());

  std::vector<std::string> names;
  std::map<scan::TableIndex, std::size_t> name_index;
  std::map<scan::TableIndex, Json> rows;  // by lane
  for (const scan::TableIndex i : drawn) {
    const scan::Event& e = t.events[i];
    const auto [name, is_new] = name_index.try_emplace(e.name, names.size());
    if (is_new) names.emplace_back(e.name == scan::none ? "" : t.names[e.name]);
    Json& row = rows.try_emplace(e.lane, Json::array()).first->second;
    row.push_back(begin_of(i) - base);
    row.push_back(e.duration());
    row.push_back(name->second);
    row.push_back(static_cast<int>(e.kind));
    row.push_back(e.step);
  }
  std::vector<scan::TableIndex> order;
  for (const auto& [lane, row] : rows) order.push_back(lane);
  std::sort(order.begin(), order.end(), [&](scan::TableIndex a, scan::TableIndex b) {
    return std::pair(t.ranks[t.lanes[a].rank].rank, a) <
           std::pair(t.ranks[t.lanes[b].rank].rank, b);
  });
  Json lanes = Json::array();
  for (const scan::TableIndex l : order) {
    const scan::Lane& lane = t.lanes[l];
    const std::string label = lane.label.empty() ? sentence("track ", lane.track) : lane.label;
    lanes.push_back({{"rank", t.ranks[lane.rank].rank}, {"label", label}, {"e", rows[l]}});
  }
  Json kinds = Json::array();
  for (int k = 0; k <= static_cast<int>(scan::EventKind::synchronize); ++k)
    kinds.push_back(to_string(static_cast<scan::EventKind>(k)));
  return {{"lanes", std::move(lanes)}, {"names", names}, {"kinds", std::move(kinds)}};
}

/// Waits by rank and group: [caused, suffered] in us, the groups with most waiting.
Json heat_map(const scan::Study& study) {
  const scan::Trace& t = study.trace;
  struct Cell {
    double caused = 0, suffered = 0;
  };
  std::map<scan::TableIndex, std::map<std::int32_t, Cell>> cells;
  std::map<scan::TableIndex, double> total;
  for (const scan::WaitState& w : study.waits.waits) {
    const scan::Communication& c = t.communications[w.communication];
    const double us = static_cast<double>(w.wait) / 1e3;
    total[c.group] += us;
    cells[c.group][t.rank(t.events[c.event])].suffered += us;
    if (w.culprit != scan::none) cells[c.group][t.ranks[w.culprit].rank].caused += us;
  }
  std::vector<std::pair<double, scan::TableIndex>> groups;
  for (const auto& [group, us] : total) groups.emplace_back(-us, group);
  std::sort(groups.begin(), groups.end());
  if (groups.size() > most_groups) groups.resize(most_groups);
  Json columns = Json::array();
  for (const auto& [us, group] : groups) {
    Json ranks = Json::object();
    for (const auto& [rank, cell] : cells[group])
      ranks[std::to_string(rank)] = {cell.caused, cell.suffered};
    const std::string name = group == scan::none ? "all ranks" : t.groups[group].name;
    columns.push_back({{"group", name}, {"waited_us", -us}, {"ranks", std::move(ranks)}});
  }
  std::vector<std::int32_t> ranks;  // files come in any order
  for (const scan::Rank& r : t.ranks) ranks.push_back(r.rank);
  std::sort(ranks.begin(), ranks.end());
  return {{"ranks", ranks}, {"columns", std::move(columns)}};
}

/// Each rank's time on the critical path, and what it mostly was.
Json critical_ranks(const scan::Study& study) {
  const scan::Trace& t = study.trace;
  std::map<scan::TableIndex, std::map<scan::TableIndex, scan::Nanoseconds>> names;  // by rank
  scan::Nanoseconds all = 0;
  for (const scan::PathSegment& s : study.critical_path.segments) {
    const scan::TableIndex name = s.event == scan::none ? scan::none : t.events[s.event].name;
    names[s.rank][name] += s.end - s.begin;
    all += s.end - s.begin;
  }
  std::vector<std::pair<scan::Nanoseconds, Json>> rows;
  for (const auto& [rank, times] : names) {
    scan::Nanoseconds sum = 0;
    auto mostly = times.begin();
    for (auto at = times.begin(); at != times.end(); ++at) {
      sum += at->second;
      if (at->second > mostly->second) mostly = at;
    }
    const std::string_view name = mostly->first == scan::none ? "" : t.names[mostly->first];
    rows.emplace_back(-sum, Json{{"rank", t.ranks[rank].rank},
                                 {"ns", sum},
                                 {"share", static_cast<double>(sum) / static_cast<double>(all)},
                                 {"mostly", cut(name, 60)}});
  }
  std::sort(rows.begin(), rows.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
  Json out = Json::array();
  for (auto& [ns, row] : rows) out.push_back(std::move(row));
  return out;
}

constexpr std::string_view head = R"page(<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>mega-scan</title>
<style>
:root{--ink:#1b1f24;--soft:#5b6570;--line:#d8dde3;--paper:#fff;--tint:#f5f7f9;--bad:#b3261e}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ec;--soft:#9aa4af;--line:#3a424b;--paper:#14181c;--tint:#1d2329;--bad:#ff8a80}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1240px;padding:1.5rem;font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper)}
h1{font-size:1.3rem;margin:0 0 .5rem}h2{font-size:1.05rem;margin:2rem 0 .5rem}
.verdict{border-left:4px solid var(--bad);background:var(--tint);padding:.6rem 1rem;margin:.6rem 0}
.verdict.none{border-color:#2e7d32}.verdict b{display:block}
.verdict ul{margin:.3rem 0 0;padding-left:1.2rem;color:var(--soft)}
p.fact{margin:.2rem 0;color:var(--soft)}
canvas{width:100%;border:1px solid var(--line);display:block;touch-action:none;cursor:grab}
#tip{position:fixed;pointer-events:none;background:var(--ink);color:var(--paper);padding:.25rem .5rem;font-size:13px;border-radius:3px;max-width:34rem;display:none;z-index:2}
.bar{display:flex;gap:.8rem;align-items:center;flex-wrap:wrap;margin:.4rem 0;color:var(--soft);font-size:13px}
button,input{font:inherit;color:inherit;background:var(--tint);border:1px solid var(--line);border-radius:3px;padding:.1rem .5rem}
table{border-collapse:collapse;font-size:13px}td,th{padding:.15rem .5rem;border:1px solid var(--line);text-align:right}
th{color:var(--soft);font-weight:500}.wide{overflow:auto;max-height:32rem}
.key{display:inline-block;width:.8em;height:.8em;margin-right:.3em;vertical-align:-.05em}
</style></head><body>
<h1>mega-scan</h1><div id="verdicts"></div><div id="facts"></div>
<h2>Timeline</h2>
<div class="bar"><button id="all">whole</button><button id="in">zoom in</button><button id="out">zoom out</button>
<label>find <input id="find" size="18" placeholder="part of a name"></label><span id="keys"></span></div>
<canvas id="view" height="10"></canvas>
<p class="fact" id="remark"></p>
<div id="paths"></div><div id="heat"></div><div id="whatif"></div><div id="remarks"></div>
<div id="tip"></div>
<script id="data" type="application/json">)page";

constexpr std::string_view tail = R"page(</script>
<script>
"use strict";
const D=JSON.parse(document.getElementById("data").textContent);
const $=id=>document.getElementById(id);
const add=(parent,tag,text,cls)=>{const e=document.createElement(tag);if(text!==undefined)e.textContent=text;if(cls)e.className=cls;parent.appendChild(e);return e;};
const time=ns=>{const a=Math.abs(ns);return a>=1e9?(ns/1e9).toFixed(3)+" s":a>=1e6?(ns/1e6).toFixed(3)+" ms":a>=1e3?(ns/1e3).toFixed(2)+" us":ns.toFixed(0)+" ns";};

for(const v of D.statements){const box=add($("verdicts"),"div",undefined,"verdict");add(box,"b",v.headline);const ul=add(box,"ul");for(const d of v.details)add(ul,"li",d);}
if(!D.statements.length)add(add($("verdicts"),"div",undefined,"verdict none"),"b",D.health);
for(const f of D.facts)add($("facts"),"p",f,"fact");
if(D.remarks.length){add($("remarks"),"h2","Of the input");for(const r of D.remarks)add($("remarks"),"p",r,"fact");}
$("remark").textContent=D.remark;

// Waiting that spreads: each rank waited most for the one before it.
const spread=D.report.verdicts.filter(v=>v.path.length>1);
if(spread.length){add($("paths"),"h2","Propagation");for(const v of spread)add($("paths"),"p",v.class+": rank "+v.path.join(" → rank "));}
if(D.critical.length){add($("paths"),"h2","Critical path");const t=add(add($("paths"),"div",undefined,"wide"),"table");
 const h=add(t,"tr");for(const c of ["rank","time","share","mostly"])add(h,"th",c);
 for(const r of D.critical){const row=add(t,"tr");add(row,"td",r.rank);add(row,"td",time(r.ns));add(row,"td",(100*r.share).toFixed(1)+" %");add(row,"td",r.mostly);}}

// Timeline.
const T=D.timeline,canvas=$("view"),g=canvas.getContext("2d"),left=150,rowH=16,topH=22;
const hue={forward:"#4c8bf5",backward:"#7b5ea7",weight:"#a678c8",loss:"#3aa6a0",optimizer:"#c58b2a",compute:"#5a9bd4",communication:"#d9534f",memory:"#8a9a5b",synchronize:"#b8bec6",iteration:"#c9d3dd",host_op:"#8fb0c9",launch:"#9aa4af",other:"#9aa4af"};
const used=new Set();let last=1;
for(const l of T.lanes)for(let i=0;i<l.e.length;i+=5){used.add(T.kinds[l.e[i+3]]);last=Math.max(last,l.e[i]+l.e[i+1]);}
for(const k of T.kinds)if(used.has(k)){const s=add($("keys"),"span");s.style.marginRight=".8em";const b=add(s,"span",undefined,"key");b.style.background=hue[k];s.append(k);}
let from=0,to=last,needle="";
function draw(){
 const w=canvas.clientWidth,h=topH+rowH*T.lanes.length,r=devicePixelRatio||1;
 canvas.width=w*r;canvas.height=h*r;canvas.style.height=h+"px";g.setTransform(r,0,0,r,0,0);
 const css=getComputedStyle(document.body),ink=css.color;g.clearRect(0,0,w,h);g.font="11px system-ui";
 const scale=(w-left)/(to-from),x=t=>left+(t-from)*scale;
 const raw=(to-from)/8,p=10**Math.floor(Math.log10(raw)),tick=[1,2,5,10].map(m=>m*p).find(v=>v>=raw);
 g.fillStyle=ink;for(let t=Math.ceil(from/tick)*tick;t<=to;t+=tick){g.globalAlpha=.15;g.fillRect(x(t),topH-4,1,h);g.globalAlpha=.8;g.fillText(time(t),x(t)+3,12);}
 g.globalAlpha=1;
 T.lanes.forEach((l,n)=>{const y=topH+n*rowH;
  if(n===0||T.lanes[n-1].rank!==l.rank){g.globalAlpha=.3;g.fillStyle=ink;g.fillRect(0,y,w,1);g.globalAlpha=1;}
  g.fillStyle=ink;g.fillText(("rank "+l.rank+"  "+l.label).slice(0,26),4,y+12);
  let drawn=-1;
  for(let i=0;i<l.e.length;i+=5){const b=l.e[i],e=b+l.e[i+1];if(e<from)continue;if(b>to)break;
   const x0=Math.max(left,x(b)),x1=Math.min(w,x(e)),wide=Math.max(.7,x1-x0-.3);
   if(x1-x0<.5&&x0<drawn+.7)continue;drawn=x0;
   const name=T.names[l.e[i+2]],hit=!needle||name.toLowerCase().includes(needle);
   g.globalAlpha=hit?1:.15;g.fillStyle=hue[T.kinds[l.e[i+3]]];g.fillRect(x0,y+1,wide,rowH-2);
   if(wide>40){g.fillStyle="#fff";g.save();g.beginPath();g.rect(x0,y,wide,rowH);g.clip();g.fillText(name,x0+3,y+12);g.restore();}}
  g.globalAlpha=1;});
}
const zoom=(f,at)=>{const c=at===undefined?(from+to)/2:at;from=Math.max(0,c-(c-from)*f);to=Math.min(last,c+(to-c)*f);if(to-from<50)to=from+50;draw();};
const at=e=>{const b=canvas.getBoundingClientRect();return [from+(e.clientX-b.left-left)/(b.width-left)*(to-from),Math.floor((e.clientY-b.top-topH)/rowH)];};
$("all").onclick=()=>{from=0;to=last;draw();};$("in").onclick=()=>zoom(.5);$("out").onclick=()=>zoom(2);
$("find").oninput=e=>{needle=e.target.value.toLowerCase();draw();};
canvas.addEventListener("wheel",e=>{if(!e.ctrlKey&&!e.shiftKey)return;e.preventDefault();zoom(e.deltaY>0?1.25:.8,at(e)[0]);},{passive:false});
canvas.ondblclick=e=>zoom(.4,at(e)[0]);
let drag=null;canvas.onpointerdown=e=>{drag=[e.clientX,from,to];canvas.setPointerCapture(e.pointerId);};canvas.onpointerup=()=>drag=null;
canvas.onpointermove=e=>{const tip=$("tip");
 if(drag){const d=(e.clientX-drag[0])/(canvas.clientWidth-left)*(drag[2]-drag[1]),span=drag[2]-drag[1];from=Math.min(Math.max(0,drag[1]-d),last-span);to=from+span;draw();return;}
 const [t,n]=at(e),l=T.lanes[n];let found=-1;if(l)for(let i=0;i<l.e.length;i+=5){if(l.e[i]>t)break;if(l.e[i]+l.e[i+1]>=t)found=i;}
 if(found<0){tip.style.display="none";return;}
 tip.textContent="rank "+l.rank+", "+T.names[l.e[found+2]]+": "+time(l.e[found+1])+" from "+time(l.e[found])+(l.e[found+4]>=0?", step "+l.e[found+4]:"");
 tip.style.display="block";tip.style.left=Math.min(innerWidth-300,e.clientX+12)+"px";tip.style.top=e.clientY+14+"px";};
canvas.onpointerleave=()=>$("tip").style.display="none";
addEventListener("resize",draw);draw();

// Waits by rank and group.
if(D.heat.columns.length){const box=$("heat");add(box,"h2","Waits by rank and group");
 add(box,"p","How long others waited for the rank (red), how long it waited for others (blue), in ms.","fact");
 const t=add(add(box,"div",undefined,"wide"),"table"),h=add(t,"tr");add(h,"th","rank");for(const c of D.heat.columns)add(h,"th",c.group.slice(0,24)).title=c.group;
 let most=1e-9;for(const c of D.heat.columns)for(const k in c.ranks)most=Math.max(most,c.ranks[k][0],c.ranks[k][1]);
 for(const r of D.heat.ranks){const row=add(t,"tr");add(row,"th",r);for(const c of D.heat.columns){const v=c.ranks[r],cell=add(row,"td",v?(v[0]/1e3).toFixed(1)+" / "+(v[1]/1e3).toFixed(1):"");
  if(v){const bad=v[0]>=v[1];cell.style.background=(bad?"rgba(217,83,79,":"rgba(76,139,245,")+(.75*Math.max(v[0],v[1])/most).toFixed(2)+")";}}}}
if(D.report.what_if){const w=D.report.what_if,box=$("whatif");add(box,"h2","What if");
 add(box,"p","Slowdown that each data-parallel rank, stage and kind of operation alone accounts for.","fact");
 const t=add(add(box,"div",undefined,"wide"),"table"),h=add(t,"tr");for(const c of ["alone","slowdown"])add(h,"th",c);
 const rows=[];for(const k in w.by_data_rank)rows.push(["data rank "+k,w.by_data_rank[k]]);for(const k in w.by_stage)rows.push(["stage "+k,w.by_stage[k]]);for(const k in w.by_operation)rows.push([k,w.by_operation[k]]);
 rows.sort((a,b)=>b[1]-a[1]);for(const [k,v] of rows.slice(0,16)){const row=add(t,"tr");add(row,"th",k.slice(0,60)).title=k;add(row,"td",v.toFixed(4));}}
</script></body></html>
)page";

/// Safe inside a script element: no "</" can end it.
std::string embedded(const Json& data) {
  const std::string text = text_of(data, -1);
  std::string out;
  out.reserve(text.size());
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '<') {
      out += "\\u003c";
    } else {
      out += text[i];
    }
  }
  return out;
}

}  // namespace

std::string html_page(const scan::Study& study) {
  Json statements = Json::array();
  for (const Statement& s : describe_verdicts(study))
    statements.push_back({{"headline", s.headline}, {"details", s.details}});
  std::vector<std::string> facts{describe_extent(study) + ".",
                                 describe_alignment(study.trace, study.alignment)};
  for (const std::string& line : describe_hosts(study.trace)) facts.push_back(line);
  if (study.what_if) facts.push_back(describe_what_if(*study.what_if, !study.diagnosis.healthy()));
  std::string remark;
  Json drawn = timeline(study, remark);
  Json report = json_of(study);
  report.erase("collectives");
  std::vector<std::string> remarks = describe_defects(study.trace);
  for (const auto* more : {&study.trace.warnings, &study.trace.notes, &study.matches.notes,
                           &study.alignment.notes, &study.diagnosis.notes, &study.hang.notes})
    remarks.insert(remarks.end(), more->begin(), more->end());
  const Json data = {{"statements", std::move(statements)},
                     {"health", describe_health(study)},
                     {"facts", facts},
                     {"remark", remark},
                     {"remarks", remarks},
                     {"timeline", std::move(drawn)},
                     {"heat", heat_map(study)},
                     {"critical", critical_ranks(study)},
                     {"report", std::move(report)}};
  return std::string(head) + embedded(data) + std::string(tail);
}

}  // namespace scan_tool
