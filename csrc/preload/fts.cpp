// Hooks of fts, which the C library implements by calls of its own. A walk with a packed
// root never changes the current directory (as with FTS_NOCHDIR), so all paths to access are
// whole.
#include <dirent.h>
#include <fcntl.h>
#include <fts.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>
#include <vector>

#include "preload/hook.hpp"
#include "preload/paths.hpp"

namespace pydist::preload {
namespace {

using Compare = int (*)(const void*, const void*);  // of two FTSENT**
constexpr int kMark = -0x70647473;  // in fts_rfd, where the C library has a descriptor

struct Tree {
  FTS fts{};
  FTSENT* roots = nullptr;
  bool started = false;
};

Tree* tree_of(FTS* fts) {
  return fts != nullptr && fts->fts_rfd == kMark ? reinterpret_cast<Tree*>(fts) : nullptr;
}

void free_entry(FTSENT* entry) {
  if (entry == nullptr) return;
  std::free(entry->fts_path);
  std::free(entry->fts_statp);
  std::free(entry);
}

void free_list(FTSENT* first) {
  while (first != nullptr) {
    FTSENT* const next = first->fts_link;
    free_entry(first);
    first = next;
  }
}

FTSENT* make_entry(const std::string& path, const std::string& name, FTSENT* parent, int level) {
  auto* made = static_cast<FTSENT*>(std::calloc(1, sizeof(FTSENT) + name.size() + 1));
  if (made == nullptr) throw std::bad_alloc();
  made->fts_path = made->fts_accpath = strdup(path.c_str());
  made->fts_statp = static_cast<struct stat*>(std::calloc(1, sizeof(struct stat)));
  if (made->fts_path == nullptr || made->fts_statp == nullptr) {
    free_entry(made);
    throw std::bad_alloc();
  }
  std::memcpy(made->fts_name, name.c_str(), name.size() + 1);
  made->fts_pathlen = static_cast<unsigned short>(path.size());
  made->fts_namelen = static_cast<unsigned short>(name.size());
  made->fts_level = static_cast<short>(level);
  made->fts_parent = parent;
  made->fts_instr = 0;
  return made;
}

bool is_dot(const char* name) {
  return std::strcmp(name, ".") == 0 || std::strcmp(name, "..") == 0;
}

// What an entry is; a directory that is also above itself is a cycle.
unsigned short classify(const Tree& tree, FTSENT* entry, bool follow) {
  struct stat& status = *entry->fts_statp;
  const bool through = follow || (tree.fts.fts_options & FTS_LOGICAL) != 0;
  entry->fts_errno = 0;
  if (::fstatat(AT_FDCWD, entry->fts_path, &status, through ? 0 : AT_SYMLINK_NOFOLLOW) != 0) {
    const int error = errno;
    if (through && ::lstat(entry->fts_path, &status) == 0) return FTS_SLNONE;
    entry->fts_errno = error;
    return FTS_NS;
  }
  entry->fts_dev = status.st_dev;
  entry->fts_ino = status.st_ino;
  entry->fts_nlink = status.st_nlink;
  if (S_ISLNK(status.st_mode)) return FTS_SL;
  if (S_ISREG(status.st_mode)) return FTS_F;
  if (!S_ISDIR(status.st_mode)) return FTS_DEFAULT;
  if (entry->fts_level > FTS_ROOTLEVEL && is_dot(entry->fts_name)) return FTS_DOT;
  for (FTSENT* above = entry->fts_parent; above->fts_level >= FTS_ROOTLEVEL;
       above = above->fts_parent) {
    if (above->fts_ino != entry->fts_ino || above->fts_dev != entry->fts_dev) continue;
    entry->fts_cycle = above;
    return FTS_DC;
  }
  return FTS_D;
}

FTSENT* link(const Tree& tree, std::vector<FTSENT*>& entries) {
  if (const Compare compare = tree.fts.fts_compar) {
    std::sort(entries.begin(), entries.end(),
              [&](const FTSENT* a, const FTSENT* b) { return compare(&a, &b) < 0; });
  }
  for (std::size_t i = 0; i + 1 < entries.size(); ++i) entries[i]->fts_link = entries[i + 1];
  return entries.empty() ? nullptr : entries.front();
}

// The entries of a directory. On failure the directory says why.
FTSENT* list(const Tree& tree, FTSENT* directory, bool names_only) {
  std::vector<FTSENT*> entries;
  DIR* stream = ::opendir(directory->fts_path);
  if (stream == nullptr) {
    directory->fts_info = FTS_DNR;
    directory->fts_errno = errno;
    return nullptr;
  }
  std::string start = directory->fts_path;
  if (start.back() != '/') start += '/';
  while (const dirent* found = ::readdir(stream)) {
    if (is_dot(found->d_name) && (tree.fts.fts_options & FTS_SEEDOT) == 0) continue;
    FTSENT* made =
        make_entry(start + found->d_name, found->d_name, directory, directory->fts_level + 1);
    const bool unknown = found->d_type == DT_DIR || found->d_type == DT_UNKNOWN;
    const bool skip = names_only || ((tree.fts.fts_options & FTS_NOSTAT) != 0 && !unknown);
    made->fts_info = skip ? FTS_NSOK : classify(tree, made, false);
    entries.push_back(made);
  }
  ::closedir(stream);
  if (entries.empty()) directory->fts_info = FTS_DP;
  return link(tree, entries);
}

// Makes a root the current entry: then its name is the last component of its path, as in the C
// library.
FTSENT* enter_root(FTS& fts, FTSENT* root) {
  if (root != nullptr) {
    const char* last = std::strrchr(root->fts_name, '/');
    if (last != nullptr && (last != root->fts_name || last[1] != 0)) {
      root->fts_namelen = static_cast<unsigned short>(std::strlen(last + 1));
      std::memmove(root->fts_name, last + 1, root->fts_namelen + std::size_t{1});
    }
  }
  return fts.fts_cur = root;
}

FTSENT* advance(Tree& tree) {
  FTS& fts = tree.fts;
  FTSENT* at = fts.fts_cur;
  if (!tree.started) {
    tree.started = true;
    return enter_root(fts, tree.roots);
  }
  if (at == nullptr) return nullptr;
  const unsigned short wish = at->fts_instr;
  at->fts_instr = 0;
  if (wish == FTS_AGAIN || (wish == FTS_FOLLOW && at->fts_info == FTS_SL)) {
    at->fts_info = classify(tree, at, wish == FTS_FOLLOW);
    return at;
  }
  if (at->fts_info == FTS_D) {
    const bool foreign =
        (fts.fts_options & FTS_XDEV) != 0 && at->fts_level > 0 && at->fts_dev != fts.fts_dev;
    if (wish == FTS_SKIP || foreign) {
      free_list(fts.fts_child);
      fts.fts_child = nullptr;
      at->fts_info = FTS_DP;
      return at;
    }
    if (at->fts_level == FTS_ROOTLEVEL) fts.fts_dev = at->fts_dev;
    FTSENT* children = fts.fts_child;
    fts.fts_child = nullptr;
    if (children == nullptr || children->fts_info == FTS_NSOK) {
      free_list(children);
      children = list(tree, at, false);
    }
    return children == nullptr ? at : fts.fts_cur = children;
  }
  while (true) {
    FTSENT* const done = at;
    FTSENT* const parent = done->fts_parent;
    at = done->fts_link;
    if (done->fts_level == FTS_ROOTLEVEL) tree.roots = at;
    free_entry(done);
    if (at == nullptr && parent->fts_level == FTS_ROOTPARENTLEVEL) {
      errno = 0;
      return fts.fts_cur = nullptr;
    }
    if (at == nullptr) {
      parent->fts_info = parent->fts_errno != 0 ? FTS_ERR : FTS_DP;
      return fts.fts_cur = parent;
    }
    if (at->fts_instr == FTS_SKIP) continue;  // set by way of fts_children
    if (at->fts_instr == FTS_FOLLOW) at->fts_info = classify(tree, at, true);
    return at->fts_level == FTS_ROOTLEVEL ? enter_root(fts, at) : fts.fts_cur = at;
  }
}

Tree* open_tree(char* const* paths, int options, Compare compare) {
  auto* tree = new Tree;
  tree->fts.fts_rfd = kMark;
  tree->fts.fts_options = options;
  tree->fts.fts_compar = compare;
  FTSENT* above = make_entry("", "", nullptr, FTS_ROOTPARENTLEVEL);
  tree->fts.fts_array = static_cast<FTSENT**>(std::malloc(sizeof(FTSENT*)));
  if (tree->fts.fts_array == nullptr) throw std::bad_alloc();
  tree->fts.fts_array[0] = above;
  std::vector<FTSENT*> roots;
  for (; *paths != nullptr; ++paths) {
    FTSENT* root = make_entry(*paths, *paths, above, FTS_ROOTLEVEL);
    root->fts_info = classify(*tree, root, (options & FTS_COMFOLLOW) != 0);
    roots.push_back(root);
  }
  tree->roots = link(*tree, roots);
  return tree;
}

// Calls a function that can run out of memory.
template <class Function>
auto within_memory(Function function) -> decltype(function()) {
  try {
    return function();
  } catch (const std::bad_alloc&) {
    errno = ENOMEM;
    return nullptr;
  }
}

}  // namespace

PYDIST_HOOK(FTS*, fts_open, char* const* paths, int options, Compare compare) {
  bool packed = false;
  for (char* const* path = paths; *path != nullptr; ++path) {
    const Target target(AT_FDCWD, *path);
    packed = packed || target.in_pack();
  }
  if (!packed) return real_fts_open(paths, options, compare);
  return within_memory([&] { return &open_tree(paths, options, compare)->fts; });
}
PYDIST_ALIAS(fts64_open, fts_open);

PYDIST_HOOK(FTSENT*, fts_read, FTS* fts) {
  Tree* tree = tree_of(fts);
  if (tree == nullptr) return real_fts_read(fts);
  return within_memory([&] { return advance(*tree); });
}
PYDIST_ALIAS(fts64_read, fts_read);

PYDIST_HOOK(FTSENT*, fts_children, FTS* fts, int what) {
  Tree* tree = tree_of(fts);
  if (tree == nullptr) return real_fts_children(fts, what);
  if (what != 0 && what != FTS_NAMEONLY) {
    errno = EINVAL;
    return nullptr;
  }
  errno = 0;
  if (!tree->started) return tree->roots;
  FTSENT* at = fts->fts_cur;
  if (at == nullptr || at->fts_info != FTS_D) return nullptr;
  free_list(fts->fts_child);
  fts->fts_child = nullptr;
  return within_memory([&] {
    const unsigned short kind = at->fts_info;
    fts->fts_child = list(*tree, at, what == FTS_NAMEONLY);
    if (fts->fts_child == nullptr && at->fts_info == FTS_DP) at->fts_info = kind;
    return fts->fts_child;
  });
}
PYDIST_ALIAS(fts64_children, fts_children);

PYDIST_HOOK(int, fts_set, FTS* fts, FTSENT* entry, int wish) {
  if (tree_of(fts) == nullptr) return real_fts_set(fts, entry, wish);
  if (wish != 0 && wish != FTS_AGAIN && wish != FTS_FOLLOW && wish != FTS_NOINSTR &&
      wish != FTS_SKIP) {
    errno = EINVAL;
    return 1;
  }
  entry->fts_instr = static_cast<unsigned short>(wish);
  return 0;
}
PYDIST_ALIAS(fts64_set, fts_set);

PYDIST_HOOK(int, fts_close, FTS* fts) {
  Tree* tree = tree_of(fts);
  if (tree == nullptr) return real_fts_close(fts);
  free_list(fts->fts_child);
  // From the current entry up; each has the siblings that were not visited.
  FTSENT* at = tree->started ? fts->fts_cur : tree->roots;
  while (at != nullptr && at->fts_level >= FTS_ROOTLEVEL) {
    FTSENT* const parent = at->fts_parent;
    free_list(at);
    at = parent;
  }
  free_entry(fts->fts_array[0]);
  std::free(fts->fts_array);
  delete tree;
  return 0;
}
PYDIST_ALIAS(fts64_close, fts_close);

}  // namespace pydist::preload
