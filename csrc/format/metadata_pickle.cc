#include "format/metadata_pickle.h"

#include <algorithm>
#include <array>
#include <utility>

#include "format/pickle_writer.h"

namespace torch_ckpt {
namespace {

using namespace pickle_opcodes;

constexpr std::string_view kMetadataModule = "torch.distributed.checkpoint.metadata";

// Ordered by their numbers in DCP's _MEM_FORMAT_ENCODING.
constexpr std::array<std::string_view, 3> kMemoryFormats = {"contiguous_format", "channels_last",
                                                            "preserve_format"};

// Estimated pickle length per box: one record in each of two dicts, one recalled key, and numbers.
constexpr size_t kExpectedNbytesABox = 96;

bool is_name(std::string_view text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), [](char c) {
    return c == '_' || (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
  });
}

Bytes key_of(const Dims& dims) { return std::as_bytes(std::span(dims)); }

class MetadataPickler {
 public:
  MetadataPickler(const Index& index, const StorageMeta& storage)
      : index_(index), storage_(storage), out_(expected_nbytes(index)) {}

  Result<std::vector<std::byte>> run() {
    for (const IndexedEntry& entry : index_.entries) RETURN_IF_ERROR(check(entry));
    begin_record(metadata_);
    // Written first, so that its many field names get memo numbers below 256.
    out_.text("storage_data");
    add_places();
    out_.text("state_dict_metadata");
    add_entries();
    out_.text("planner_data");
    add_paths();
    out_.text("storage_meta");
    add_storage_meta();
    out_.text("version");
    if (index_.version.empty()) {
      out_.op(kNone);
    } else {
      out_.text(index_.version);
    }
    end_record();
    return out_.finish();
  }

 private:
  static size_t expected_nbytes(const Index& index) {
    size_t nbytes = 4096;
    for (const IndexedEntry& entry : index.entries) {
      nbytes += 2 * entry.fqn.size() + kExpectedNbytesABox * (entry.boxes.size() + 1);
    }
    return nbytes;
  }

  Status check(const IndexedEntry& entry) const {
    for (const IndexedBox& box : entry.boxes) {
      if (box.file < 0 || std::cmp_greater_equal(box.file, index_.files.size())) {
        return invalid_argument("'", entry.fqn, "' is in file ", box.file, " of ",
                                index_.files.size());
      }
    }
    if (!entry.is_tensor) {
      if (entry.boxes.size() == 1) return ok_status();
      return invalid_argument("the object '", entry.fqn, "' has ", entry.boxes.size(), " boxes");
    }
    if (is_name(entry.dtype) && memory_format_of(entry) < kMemoryFormats.size()) return ok_status();
    return invalid_argument("'", entry.fqn, "' is a tensor of ", entry.dtype, ", ",
                            entry.memory_format);
  }

  static size_t memory_format_of(const IndexedEntry& entry) {
    return static_cast<size_t>(
        std::find(kMemoryFormats.begin(), kMemoryFormats.end(), entry.memory_format) -
        kMemoryFormats.begin());
  }

  // Begins an instance. The caller then writes field names and values.
  void begin_record(PickleGlobal& cls) {
    out_.global(cls);
    out_.ops<4>({kEmptyTuple, kNewObj, kEmptyDict, kMark});
  }
  void begin_empty_record(PickleGlobal& cls) {
    out_.global(cls);
    out_.ops<2>({kEmptyTuple, kNewObj});
  }
  void end_record() { out_.ops<2>({kSetItems, kBuild}); }

  void add_entries() {
    next_offset_ = 0;
    out_.op(kEmptyDict);
    out_.fill(index_.entries.size(), kSetItem, kSetItems, [&](size_t i) {
      const IndexedEntry& entry = index_.entries[i];
      out_.text(entry.fqn);
      if (entry.is_tensor) {
        add_tensor(entry);
      } else {
        begin_empty_record(bytes_metadata_);
      }
    });
  }

  void add_tensor(const IndexedEntry& entry) {
    begin_record(tensor_metadata_);
    out_.word(properties_word_);
    add_properties(entry);
    out_.word(size_word_);
    add_sizes(entry.sizes);
    out_.word(chunks_word_);
    out_.op(kEmptyList);
    out_.fill(entry.boxes.size(), kAppend, kAppends, [&](size_t i) {
      begin_record(chunk_metadata_);
      out_.word(offsets_word_);
      out_.recall(offsets_[next_offset_++]);
      out_.word(sizes_word_);
      add_sizes(entry.boxes[i].sizes);
      end_record();
    });
    end_record();
  }

  // Writes a torch.Size. Returns its memo, so that the caller can recall it without a search.
  Memo add_sizes(const Dims& dims) {
    Memo& memo = sizes_[key_of(dims)];
    if (memo != kNoMemo) {
      out_.recall(memo);
      return memo;
    }
    out_.global(size_);
    out_.tuple(dims.size(), [&](size_t d) { out_.number(dims[d]); });
    out_.op(kTuple1);
    out_.op(kReduce);
    return memo = out_.memoise();
  }

  // Writes the state that TensorProperties.__getstate__ returns.
  void add_properties(const IndexedEntry& entry) {
    const auto same = [&](const Properties& known) {
      return known.entry->dtype == entry.dtype &&
             known.entry->memory_format == entry.memory_format &&
             known.entry->requires_grad == entry.requires_grad &&
             known.entry->pin_memory == entry.pin_memory;
    };
    const auto known = std::find_if(properties_.begin(), properties_.end(), same);
    if (known != properties_.end()) return out_.recall(known->memo);
    begin_empty_record(tensor_properties_);
    properties_.push_back({&entry, out_.memoise()});
    out_.op(kMark);
    add_dtype(entry.dtype);
    add_strided();
    out_.boolean(entry.requires_grad);
    add_memory_format(memory_format_of(entry));
    out_.boolean(entry.pin_memory);
    out_.op(kTuple);
    out_.op(kBuild);
  }

  void add_dtype(const std::string& name) {
    Memo& memo = dtypes_[as_bytes(name)];
    PickleGlobal dtype = {"torch", name, memo};
    out_.global(dtype);
    memo = dtype.memo;
  }

  void add_strided() {
    if (strided_ != kNoMemo) return out_.recall(strided_);
    out_.global(get_layout_);
    out_.text("torch.strided");
    out_.op(kTuple1);
    out_.op(kReduce);
    strided_ = out_.memoise();
  }

  void add_memory_format(size_t number) {
    Memo& memo = memory_formats_[number];
    if (memo != kNoMemo) return out_.recall(memo);
    out_.global(memory_format_);
    out_.number(static_cast<int64_t>(number));
    out_.op(kTuple1);
    out_.op(kReduce);
    memo = out_.memoise();
  }

  void add_paths() {
    if (!index_.has_paths) return out_.op(kNone);
    out_.op(kEmptyDict);
    out_.fill(index_.paths.size(), kSetItem, kSetItems, [&](size_t i) {
      const IndexedPath& path = index_.paths[i];
      out_.text(path.fqn);
      out_.tuple(path.keys.size(), [&](size_t k) {
        if (const auto* number = std::get_if<int64_t>(&path.keys[k])) {
          out_.number(*number);
        } else {
          out_.text(std::get<std::string>(path.keys[k]));
        }
      });
    });
  }

  void add_places() {
    std::vector<PickleWord> files;
    for (const IndexedFile& file : index_.files) files.push_back({file.name});
    size_t box_count = 0;
    for (const IndexedEntry& entry : index_.entries) box_count += entry.boxes.size();
    offsets_.reserve(box_count);
    PickleWord fqn;
    size_t next_entry = 0;
    size_t box = 0;
    const IndexedEntry* entry = nullptr;
    out_.op(kEmptyDict);
    out_.fill(box_count, kSetItem, kSetItems, [&](size_t) {
      while (entry == nullptr || box == entry->boxes.size()) {
        entry = &index_.entries[next_entry++];
        fqn = {entry->fqn};
        box = 0;
      }
      add_metadata_index(*entry, box, fqn);
      const IndexedBox& place = entry->boxes[box++];
      add_place(place, files[static_cast<size_t>(place.file)]);
    });
  }

  void add_metadata_index(const IndexedEntry& entry, size_t box, PickleWord& fqn) {
    begin_record(metadata_index_);
    out_.word(fqn_word_);
    out_.word(fqn);
    out_.word(index_word_);
    if (entry.boxes.size() == 1 && entry.boxes.front().sizes == entry.sizes) {
      out_.op(kNone);
    } else {
      out_.number(static_cast<int64_t>(box));
    }
    if (entry.is_tensor) {
      out_.word(offset_word_);
      offsets_.push_back(add_sizes(entry.boxes[box].offsets));
    }
    end_record();
  }

  void add_place(const IndexedBox& box, PickleWord& file) {
    begin_record(storage_info_);
    out_.word(relative_path_word_);
    out_.word(file);
    out_.word(offset_word_);
    out_.number(box.offset);
    out_.word(length_word_);
    out_.number(box.nbytes);
    if (!box.transforms.empty()) {
      out_.text("transform_descriptors");
      add_list(box.transforms);
    }
    end_record();
  }

  void add_list(const std::vector<std::string>& texts) {
    out_.op(kEmptyList);
    out_.fill(texts.size(), kAppend, kAppends, [&](size_t i) { out_.text(texts[i]); });
  }

  void add_optional(const std::optional<std::string>& text) {
    if (text) {
      out_.text(*text);
    } else {
      out_.op(kNone);
    }
  }

  void add_storage_meta() {
    begin_record(storage_meta_);
    out_.text("checkpoint_id");
    if (storage_.checkpoint_id && storage_.checkpoint_is_path) out_.global(posix_path_);
    add_optional(storage_.checkpoint_id);
    if (storage_.checkpoint_id && storage_.checkpoint_is_path) {
      out_.op(kTuple1);
      out_.op(kReduce);
    }
    out_.text("save_id");
    add_optional(storage_.save_id);
    out_.text("load_id");
    add_optional(storage_.load_id);
    out_.text("modules");
    add_list(storage_.modules);
    end_record();
  }

  struct Properties {
    const IndexedEntry* entry;  // The first entry with these properties.
    Memo memo;
  };

  const Index& index_;
  const StorageMeta& storage_;
  PickleWriter out_;

  PickleGlobal metadata_ = {kMetadataModule, "Metadata"};
  PickleGlobal tensor_metadata_ = {kMetadataModule, "TensorStorageMetadata"};
  PickleGlobal bytes_metadata_ = {kMetadataModule, "BytesStorageMetadata"};
  PickleGlobal chunk_metadata_ = {kMetadataModule, "ChunkStorageMetadata"};
  PickleGlobal tensor_properties_ = {kMetadataModule, "TensorProperties"};
  PickleGlobal memory_format_ = {kMetadataModule, "_MEM_FORMAT_ENCODING"};
  PickleGlobal metadata_index_ = {kMetadataModule, "MetadataIndex"};
  PickleGlobal storage_meta_ = {kMetadataModule, "StorageMeta"};
  PickleGlobal storage_info_ = {"torch.distributed.checkpoint.filesystem", "_StorageInfo"};
  PickleGlobal get_layout_ = {"torch.serialization", "_get_layout"};
  PickleGlobal size_ = {"torch", "Size"};
  PickleGlobal posix_path_ = {"pathlib", "PosixPath"};

  // Field names that occur for every FQN or box.
  PickleWord properties_word_ = {"properties"};
  PickleWord size_word_ = {"size"};
  PickleWord chunks_word_ = {"chunks"};
  PickleWord offsets_word_ = {"offsets"};
  PickleWord sizes_word_ = {"sizes"};
  PickleWord fqn_word_ = {"fqn"};
  PickleWord index_word_ = {"index"};
  PickleWord offset_word_ = {"offset"};
  PickleWord relative_path_word_ = {"relative_path"};
  PickleWord length_word_ = {"length"};

  MemoTable sizes_;
  MemoTable dtypes_;
  std::vector<Properties> properties_;
  std::array<Memo, kMemoryFormats.size()> memory_formats_ = {kNoMemo, kNoMemo, kNoMemo};
  Memo strided_ = kNoMemo;
  std::vector<Memo> offsets_;  // Memo of the offsets of every tensor box, in order.
  size_t next_offset_ = 0;     // Position in offsets_ of the next memo to recall.
};

}  // namespace

Result<std::vector<std::byte>> pickle_metadata(const Index& index, const StorageMeta& storage) {
  return MetadataPickler(index, storage).run();
}

}  // namespace torch_ckpt
