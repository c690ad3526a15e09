#include "bindings/value_stack.h"

#include <algorithm>

namespace torch_ckpt {
Status ValueStack::push(Kind kind, PyObject* new_reference) {
  if (new_reference == nullptr) return python_error();
  Value& value = stack_.emplace_back();
  value.object = PyRef::steal(new_reference);
  value.kind = kind;
  value.is_open = kind == Kind::kList || kind == Kind::kRecord;
  value.is_hashable = kind == Kind::kText || kind == Kind::kInt;
  return ok_status();
}

void ValueStack::push_empty_dict() {
  Value& value = stack_.emplace_back();
  value.kind = Kind::kDict;
  value.is_open = true;
}

Status ValueStack::need(size_t count) const { return need_below(stack_.size(), count); }

Status ValueStack::need_below(size_t begin, size_t count) const {
  const size_t floor = marks_.empty() ? 0 : marks_.back();
  return begin >= floor && begin - floor >= count ? ok_status() : broken("its stack runs out");
}

ValueStack::Value ValueStack::pop() {
  Value value = std::move(stack_.back());
  stack_.pop_back();
  return value;
}

Status ValueStack::pop_mark(size_t* begin) {
  if (marks_.empty()) return broken("there is no mark");
  *begin = marks_.back();
  marks_.pop_back();
  return ok_status();
}

Status ValueStack::freeze(Value& value) {
  if (!value.is_complete) return broken("a record has no fields");
  if (value.kind == Kind::kDict && !value.object) {
    value.object = PyRef::steal(PyDict_New());
    if (!value.object) return python_error();
  }
  if (!value.is_open) return ok_status();
  value.is_open = false;
  if (value.memo != kNoMemo) {
    Memory& memory = memo_[value.memo];
    memory.object = PyRef::share(value.object.get());
    memory.weight_or_place = value.weight;
    memory.depth = value.depth;
    memory.is_open = false;
    memory.is_hashable = value.is_hashable;
  }
  return ok_status();
}

void ValueStack::forget(const Value& dict) {
  if (dict.memo != kNoMemo) memo_[dict.memo].is_open = false;
}

Status ValueStack::charge(uint64_t weight) {
  if (weight > max_weight_ - charged_)
    return refused("calls that expand a few values to very many");
  charged_ += static_cast<uint32_t>(weight);
  return ok_status();
}

Status ValueStack::close(Value& child, Value* parent) {
  if (child.kind == Kind::kGlobal || child.kind == Kind::kMember)
    return refused("a global as a value");
  RETURN_IF_ERROR(freeze(child));
  if (child.depth >= kMaxDepth) return refused("values that are nested too deeply");
  parent->depth = std::max<uint8_t>(parent->depth, child.depth + 1);
  if (child.weight >= max_weight_ - parent->weight) {
    return refused("a few values that expand to very many");
  }
  parent->weight += child.weight;
  return ok_status();
}

Status ValueStack::make_tuple(size_t begin) {
  const size_t count = stack_.size() - begin;
  Value tuple;
  tuple.kind = Kind::kTuple;
  tuple.object = PyRef::steal(PyTuple_New(static_cast<Py_ssize_t>(count)));
  if (!tuple.object) return python_error();
  for (size_t i = 0; i < count; ++i) {
    RETURN_IF_ERROR(close(stack_[begin + i], &tuple));
    PyTuple_SET_ITEM(tuple.object.get(), static_cast<Py_ssize_t>(i),
                     stack_[begin + i].object.release());
  }
  stack_.resize(begin);
  stack_.push_back(std::move(tuple));
  return ok_status();
}

Status ValueStack::append(size_t begin) {
  RETURN_IF_ERROR(need_below(begin, 1));
  Value& list = stack_[begin - 1];
  if (list.kind != Kind::kList || !list.is_open) return broken("it appends to no open list");
  for (size_t i = begin; i < stack_.size(); ++i) {
    RETURN_IF_ERROR(close(stack_[i], &list));
    if (PyList_Append(list.object.get(), stack_[i].object.get()) != 0) return python_error();
  }
  stack_.resize(begin);
  return ok_status();
}

Status ValueStack::set_items(size_t begin) {
  RETURN_IF_ERROR(need_below(begin, 1));
  if ((stack_.size() - begin) % 2 != 0) return broken("a key has no value");
  Value& dict = stack_[begin - 1];
  if (dict.kind != Kind::kDict || !dict.is_open) return broken("it sets items of no open dict");
  if (!dict.object) dict.object = PyRef::steal(PyDict_New());
  if (!dict.object) return python_error();
  for (size_t i = begin; i < stack_.size(); i += 2) {
    Value& key = stack_[i];
    RETURN_IF_ERROR(close(key, &dict));
    RETURN_IF_ERROR(close(stack_[i + 1], &dict));
    // Hashing any other value may recurse deeply or not terminate.
    if (!key.is_hashable) return refused("a dict whose keys are neither names nor indices");
    if (PyDict_SetItem(dict.object.get(), key.object.get(), stack_[i + 1].object.get()) != 0) {
      return python_error();
    }
  }
  stack_.resize(begin);
  return ok_status();
}

Status ValueStack::remember(uint64_t key) {
  RETURN_IF_ERROR(need(1));
  // Picklers number memo entries consecutively. A larger number could enlarge the memo arbitrarily.
  if (key != memo_.size()) return refused("a memo that does not count up");
  Value& value = stack_.back();
  if (value.is_open) {
    if (value.memo != kNoMemo) return refused("a value that is memoised twice");
    value.memo = static_cast<uint32_t>(key);
  }
  Memory& memory = memo_.emplace_back();
  memory.object = PyRef::share(value.object.get());
  memory.weight_or_place = value.is_open ? static_cast<uint32_t>(stack_.size() - 1) : value.weight;
  memory.depth = value.depth;
  memory.kind = value.kind;
  memory.global = value.global;
  memory.is_open = value.is_open;
  memory.is_hashable = value.is_hashable;
  return ok_status();
}

Status ValueStack::recall(uint64_t key) {
  if (key >= memo_.size()) return broken("it recalls a value that is not in its memo");
  const Memory& memory = memo_[static_cast<size_t>(key)];
  // A recalled container is frozen, so adding it to itself fails.
  if (memory.is_open) RETURN_IF_ERROR(freeze(stack_[memory.weight_or_place]));
  if (!memory.object) return refused("the state of a record as a value");
  Value& value = stack_.emplace_back();
  value.object = PyRef::share(memory.object.get());
  value.weight = memory.weight_or_place;
  value.depth = memory.depth;
  value.kind = memory.kind;
  value.global = memory.global;
  value.is_hashable = memory.is_hashable;
  return ok_status();
}

Status ValueStack::finish(PyRef* result) {
  if (stack_.size() != 1 || !marks_.empty()) return broken("it does not end in one value");
  Value root;
  RETURN_IF_ERROR(close(stack_[0], &root));
  *result = std::move(stack_[0].object);
  return ok_status();
}

}  // namespace torch_ckpt
