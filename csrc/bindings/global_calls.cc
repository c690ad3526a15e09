#include "bindings/global_calls.h"

#include <algorithm>

namespace torch_ckpt {
namespace {

using Kind = ValueStack::Kind;
using Value = ValueStack::Value;

std::string quoted(PyObject* text) {
  Py_ssize_t nbytes = 0;
  const char* utf8 = PyUnicode_AsUTF8AndSize(text, &nbytes);
  if (utf8 == nullptr) {  // A lone surrogate.
    PyErr_Clear();
    return "?";
  }
  constexpr Py_ssize_t kLongest = 200;
  return std::string(utf8, static_cast<size_t>(std::min(nbytes, kLongest)));
}

bool is_size(PyObject* number) {
  if (!PyLong_CheckExact(number)) return false;
  int overflow = 0;
  return PyLong_AsLongLongAndOverflow(number, &overflow) >= 0 && overflow == 0;
}

}  // namespace

Status GlobalCalls::push() {
  RETURN_IF_ERROR(stack_->need(2));
  const Value name = stack_->pop();
  const Value module = stack_->pop();
  if (name.kind != Kind::kText || module.kind != Kind::kText) {
    return broken("a global is not named by text");
  }
  const std::string full_name = quoted(module.object.get()) + "." + quoted(name.object.get());
  const PyRef key = PyRef::steal(PyTuple_Pack(2, module.object.get(), name.object.get()));
  if (!key) return python_error();
  PyObject* entry = PyDict_GetItemWithError(vocabulary_, key.get());
  if (entry == nullptr) {
    if (PyErr_Occurred() != nullptr) return python_error();
    return refused("the global " + full_name);
  }
  PyObject* target = PyTuple_GET_ITEM(entry, 1);
  if (PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(entry, 0), "value") == 0) {
    return stack_->push(Kind::kPlain, PyRef::share(target).release());
  }
  const auto is_same = [target](const Global& global) { return global.target == target; };
  auto global = std::find_if(globals_.begin(), globals_.end(), is_same);
  if (global == globals_.end()) {
    RETURN_IF_ERROR(add_global(entry, full_name));
    global = globals_.end() - 1;
  }
  RETURN_IF_ERROR(stack_->push(Kind::kGlobal, PyRef::share(target).release()));
  stack_->top().global = static_cast<uint8_t>(global - globals_.begin());
  return ok_status();
}

Status GlobalCalls::add_global(PyObject* entry, std::string name) {
  if (globals_.size() > UINT8_MAX) return internal_error("the vocabulary is too large");
  Global global{.target = PyTuple_GET_ITEM(entry, 1), .name = std::move(name)};
  const std::string how = quoted(PyTuple_GET_ITEM(entry, 0));
  if (how == "sizes") global.how = Global::How::kSizes;
  if (how == "choice") global.how = Global::How::kChoice;
  if (how == "member") global.how = Global::How::kMember;
  if (how == "record") {
    global.how = Global::How::kRecord;
    global.fields = PyTuple_GET_ITEM(entry, 2);
    global.required = (uint64_t{1} << PyLong_AsLong(PyTuple_GET_ITEM(entry, 3))) - 1;
    global.is_hashable = PyTuple_GET_ITEM(entry, 4) == Py_True;
  }
  globals_.push_back(std::move(global));
  return ok_status();
}

bool GlobalCalls::is_member_next() {
  const auto is = [this](size_t from_top, Global::How how) {
    const Value& value = stack_->at(stack_->size() - from_top);
    return value.kind == Kind::kGlobal && globals_[value.global].how == how;
  };
  return stack_->need(3).ok() && is(3, Global::How::kMember) && is(2, Global::How::kChoice) &&
         stack_->top().kind == Kind::kText;
}

Status GlobalCalls::choose_member() {
  const Value name = stack_->pop();
  const Value choice = stack_->pop();
  PyObject* chosen = PyDict_GetItemWithError(choice.object.get(), name.object.get());
  if (chosen != nullptr) return stack_->push(Kind::kMember, PyRef::share(chosen).release());
  if (PyErr_Occurred() != nullptr) return python_error();
  return broken(globals_[choice.global].name + " has no " + quoted(name.object.get()));
}

Status GlobalCalls::call() {
  RETURN_IF_ERROR(stack_->need(2));
  const Value args = stack_->pop();
  const Value called = stack_->pop();
  if (args.kind != Kind::kTuple && args.kind != Kind::kMember) {
    return broken("the arguments of a call are no tuple");
  }
  if (called.kind != Kind::kGlobal || globals_[called.global].how == Global::How::kRecord) {
    return refused("a call of something that is no function");
  }
  const Global& global = globals_[called.global];
  const auto bad_call = [&] { return broken(global.name + " has invalid arguments"); };
  if ((global.how == Global::How::kMember) != (args.kind == Kind::kMember)) return bad_call();
  if (global.how == Global::How::kMember) {
    return stack_->push(Kind::kPlain, PyRef::share(args.object.get()).release());
  }
  const Py_ssize_t count = PyTuple_GET_SIZE(args.object.get());
  PyObject* const* items = reinterpret_cast<PyTupleObject*>(args.object.get())->ob_item;
  const bool all_texts = std::all_of(
      items, items + count, [](PyObject* item) { return PyUnicode_CheckExact(item) != 0; });
  if (global.how == Global::How::kText) {
    if (!all_texts) return bad_call();
    uint64_t weight = args.weight;  // A path has a part for each slash.
    for (Py_ssize_t i = 0; i < count; ++i) {
      weight += static_cast<uint64_t>(PyUnicode_GET_LENGTH(items[i]));
    }
    RETURN_IF_ERROR(stack_->charge(weight));
    RETURN_IF_ERROR(
        stack_->push(Kind::kPlain, PyObject_CallObject(global.target, args.object.get())));
    stack_->top().weight = static_cast<uint32_t>(weight);
    return ok_status();
  }
  if (count != 1) return bad_call();
  if (global.how == Global::How::kChoice) {
    if (!all_texts && !PyLong_CheckExact(items[0])) return bad_call();
    PyObject* chosen = PyDict_GetItemWithError(global.target, items[0]);
    if (chosen != nullptr) {
      return stack_->push(Kind::kPlain, PyRef::share(chosen).release());
    }
    return PyErr_Occurred() != nullptr ? python_error() : bad_call();
  }
  if (!PyTuple_CheckExact(items[0])) return bad_call();
  RETURN_IF_ERROR(stack_->charge(args.weight));
  PyObject* const* sizes = reinterpret_cast<PyTupleObject*>(items[0])->ob_item;
  if (!std::all_of(sizes, sizes + PyTuple_GET_SIZE(items[0]), is_size)) return bad_call();
  RETURN_IF_ERROR(stack_->push(Kind::kPlain, PyObject_CallOneArg(global.target, items[0])));
  stack_->top().weight = args.weight;
  return ok_status();
}

Status GlobalCalls::make_record() {
  RETURN_IF_ERROR(stack_->need(2));
  const Value args = stack_->pop();
  const Value cls = stack_->pop();
  if (cls.kind != Kind::kGlobal || globals_[cls.global].how != Global::How::kRecord) {
    return refused("an instance of something that is no record");
  }
  if (args.kind != Kind::kTuple || PyTuple_GET_SIZE(args.object.get()) != 0) {
    return broken("a new " + globals_[cls.global].name + " has arguments");
  }
  // Create the instance as object.__new__ does, without running code of the class.
  auto* type = reinterpret_cast<PyTypeObject*>(cls.object.get());
  RETURN_IF_ERROR(
      stack_->push(Kind::kRecord, PyBaseObject_Type.tp_new(type, args.object.get(), nullptr)));
  stack_->top().global = cls.global;
  stack_->top().is_complete = globals_[cls.global].required == 0;
  return ok_status();
}

Status GlobalCalls::open_record(size_t at, const Global** global) {
  const Value& record = stack_->at(at);
  if (record.kind != Kind::kRecord || !record.is_open) {
    return refused("a state for something other than a new record");
  }
  *global = &globals_[record.global];
  return ok_status();
}

Status GlobalCalls::build_from_items(size_t begin) {
  RETURN_IF_ERROR(stack_->need_below(begin, 2));
  if ((stack_->size() - begin) % 2 != 0) return broken("a key has no value");
  const Global* global = nullptr;
  RETURN_IF_ERROR(open_record(begin - 2, &global));
  Value& record = stack_->at(begin - 2);
  uint64_t found = 0;
  for (size_t i = begin; i < stack_->size(); i += 2) {
    Value& name = stack_->at(i);
    Value& value = stack_->at(i + 1);
    if (name.kind != Kind::kText) return broken("the name of a field is no text");
    RETURN_IF_ERROR(stack_->close(value, &record));
    RETURN_IF_ERROR(
        set_field(*global, record.object.get(), name.object.get(), value.object.get(), &found));
  }
  if ((~found & global->required) != 0) return broken("a " + global->name + " lacks a field");
  record.is_complete = true;
  record.is_hashable = global->is_hashable;
  stack_->forget(stack_->at(begin - 1));
  stack_->cut(begin - 1);
  return ok_status();
}

Status GlobalCalls::build_from_tuple() {
  RETURN_IF_ERROR(stack_->need(2));
  const Global* global = nullptr;
  RETURN_IF_ERROR(open_record(stack_->size() - 2, &global));
  Value state = stack_->pop();
  Value& record = stack_->top();
  if (state.kind != Kind::kTuple ||
      PyTuple_GET_SIZE(state.object.get()) > PyDict_GET_SIZE(global->fields)) {
    return broken("the state of a " + global->name + " is not its fields");
  }
  const Py_ssize_t given = PyTuple_GET_SIZE(state.object.get());
  RETURN_IF_ERROR(stack_->close(state, &record));
  uint64_t found = 0;
  Py_ssize_t position = 0;
  PyObject* name;
  PyObject* types;
  for (Py_ssize_t i = 0; i < given; ++i) {
    PyDict_Next(global->fields, &position, &name, &types);
    PyObject* value = PyTuple_GET_ITEM(state.object.get(), i);
    RETURN_IF_ERROR(set_field(*global, record.object.get(), name, value, &found));
  }
  if ((~found & global->required) != 0) return broken("a " + global->name + " lacks a field");
  record.is_complete = true;
  record.is_hashable = global->is_hashable;
  return ok_status();
}

Status GlobalCalls::set_field(const Global& global, PyObject* record, PyObject* name,
                              PyObject* value, uint64_t* found) {
  Py_ssize_t position = 0;
  PyObject* known;
  PyObject* types;
  for (int i = 0; PyDict_Next(global.fields, &position, &known, &types) != 0; ++i) {
    if (known != name && PyUnicode_Compare(known, name) != 0) continue;
    PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(value));
    PyObject* const* first = reinterpret_cast<PyTupleObject*>(types)->ob_item;
    PyObject* const* last = first + PyTuple_GET_SIZE(types);
    if (first != last && std::find(first, last, type) == last) {
      return broken("the field " + quoted(known) + " of a " + global.name + " is a " +
                    Py_TYPE(value)->tp_name);
    }
    *found |= uint64_t{1} << i;
    // Bypass the __setattr__ of a frozen dataclass.
    return PyObject_GenericSetAttr(record, known, value) == 0 ? ok_status() : python_error();
  }
  return refused("the field " + quoted(name) + " of a " + global.name +
                 ", which has no such field");
}

}  // namespace torch_ckpt
