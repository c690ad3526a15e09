#include "engine/exchange/exchange_stream.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings/errors.h"
#include "bindings/jobs.h"
#include "bindings/plan.h"
#include "engine/exchange/node_peers.h"
#include "plan/exchange.h"

namespace py = pybind11;

namespace torch_ckpt {
namespace {

Exchange make_exchange(const std::vector<py::bytes>& wanted, std::vector<std::string> nodes,
                       int64_t budget_nbytes, const std::vector<ReachableFiles>& reachable,
                       const std::vector<int64_t>& reach_of_rank, bool only_necessary) {
  ExchangeInput input = {
      .nodes = std::move(nodes), .budget_nbytes = budget_nbytes, .only_necessary = only_necessary};
  for (const int64_t number : reach_of_rank) {
    if (number >= std::ssize(reachable)) throw py::index_error("there are no such files");
    input.reachable.push_back(number < 0 ? nullptr : &reachable[static_cast<size_t>(number)]);
  }
  std::vector<Bytes> views;
  for (const py::bytes& bytes : wanted) views.push_back(view_of(bytes));
  return value_or_raise(without_gil([&]() -> Result<Exchange> {
    std::vector<WantedBytes> decoded;
    for (const Bytes view : views) {
      ASSIGN_OR_RETURN(WantedBytes one, WantedBytes::decode(view));
      decoded.push_back(std::move(one));
    }
    for (const WantedBytes& one : decoded) input.wanted.push_back(&one);
    return Exchange::make(input);
  }));
}

UnlockedPtr<ExchangeStream> make_stream(FileSystem& fs, const py::bytes& plan,
                                        std::shared_ptr<Peers> peers,
                                        std::map<int32_t, int64_t> pids, int64_t budget_nbytes,
                                        int64_t timeout_ms) {
  const Bytes view = view_of(plan);
  auto made = value_or_raise(without_gil([&]() -> Result<std::unique_ptr<ExchangeStream>> {
    ASSIGN_OR_RETURN(RankExchange decoded, RankExchange::decode(view));
    return ExchangeStream::make(fs, std::move(decoded),
                                make_node_peers(std::move(peers), std::move(pids)), budget_nbytes,
                                std::chrono::milliseconds(timeout_ms));
  }));
  return UnlockedPtr<ExchangeStream>(made.release());
}

}  // namespace

void bind_exchange(py::module_& module) {
  py::class_<Peers, std::shared_ptr<Peers>>(module, "Peers");
  py::class_<Exchange>(module, "Exchange")
      .def(py::init(&make_exchange), py::arg("wanted"), py::arg("nodes"), py::arg("budget_nbytes"),
           py::arg("reachable") = std::vector<ReachableFiles>(),
           py::arg("reach_of_rank") = std::vector<int64_t>(), py::arg("only_necessary") = false)
      .def_property_readonly("saved_nbytes", &Exchange::saved_nbytes)
      .def_property_readonly("wanted_nbytes", &Exchange::wanted_nbytes)
      .def_property_readonly("is_necessary", &Exchange::is_necessary)
      .def_property_readonly("missing",
                             [](const Exchange& exchange) {
                               std::vector<std::pair<std::string, std::vector<int32_t>>> out;
                               for (const MissingFile& file : exchange.missing()) {
                                 out.emplace_back(file.name, file.ranks);
                               }
                               return out;
                             })
      .def("is_in_ring", &Exchange::is_in_ring, py::arg("rank"))
      .def(
          "of_rank",
          [](const Exchange& exchange, int32_t rank) {
            return to_bytes(exchange.of_rank(rank).encode());
          },
          py::arg("rank"));
  py::class_<ExchangeStream, UnlockedPtr<ExchangeStream>>(module, "ExchangeStream")
      .def(py::init(&make_stream), py::arg("fs"), py::arg("plan"), py::arg("peers"),
           py::arg("pids"), py::arg("budget_nbytes"), py::arg("timeout_ms"), py::keep_alive<1, 2>())
      .def("finish",
           [](ExchangeStream& stream) {
             raise_if_error(without_gil([&] { return stream.finish(); }));
           })
      .def("cancel",
           [](ExchangeStream& stream) {
             without_gil([&] {
               stream.fail(cancelled("stopped the exchange: the load has failed elsewhere"));
             });
           })
      .def_property_readonly("requests", &ExchangeStream::requests)
      .def_property_readonly("waited_s", &ExchangeStream::waited_s)
      .def_property_readonly("waited_for_ranks_s",
                             [](const ExchangeStream& stream) {
                               return without_gil([&] { return stream.waited_for_ranks_s(); });
                             })
      .def("close", [](ExchangeStream& stream) { without_gil([&] { stream.close(); }); });
}

}  // namespace torch_ckpt
