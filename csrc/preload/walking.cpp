// Hooks of ftw and nftw, which the C library implements by calls of its own that no hook sees.
//
// Only walks that begin in a pack come here. The functions below call opendir, readdir, fstatat and
// chdir, which are this library's hooks, so a walk may also leave the pack through the output
// folder.
#include <dirent.h>
#include <fcntl.h>
#include <ftw.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "preload/hook.hpp"
#include "preload/mount.hpp"
#include "preload/paths.hpp"

namespace pydist::preload {
namespace {

using Told = std::function<int(const char*, const struct stat*, int, FTW*)>;

// One walk: depth first, with the descriptors of one directory open at a time. Flags and types have
// the meanings of nftw in glibc.
class Walk {
 public:
  Walk(const Told& tell, int flags) : tell_(tell), flags_(flags) {}

  // Returns the first result of `tell` that is not 0, 0 at the end, or -1 with errno. Skips of
  // FTW_ACTIONRETVAL count as 0. With FTW_CHDIR it changes back to the directory where it began.
  int run(const char* root) {
    std::string path(root);
    while (path.size() > 1 && path.back() == '/') path.pop_back();
    const std::size_t slash = path.rfind('/');
    const bool moves = (flags_ & FTW_CHDIR) != 0;
    const int before = moves ? ::open(".", O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;
    if (char* real = moves ? ::realpath(root, nullptr) : nullptr) {
      real_root_ = real;
      std::free(real);
    }
    root_size_ = path.size();
    int result = visit(path, slash == std::string::npos ? 0 : static_cast<int>(slash) + 1, 0);
    if (moves && before >= 0) {
      if (::fchdir(before) != 0) result = -1;
      ::close(before);
    }
    const bool acts = (flags_ & FTW_ACTIONRETVAL) != 0;
    return acts && (result == FTW_SKIP_SIBLINGS || result == FTW_SKIP_SUBTREE) ? 0 : result;
  }

 private:
  // Tells of one file, or enters a directory. base: the offset of the last component in `path`;
  // level: the depth below the root of the walk.
  int visit(const std::string& path, int base, int level) {
    const bool physical = (flags_ & FTW_PHYS) != 0;
    struct stat status{};
    int type = FTW_F;
    if (::fstatat(AT_FDCWD, place_of(path).c_str(), &status, physical ? AT_SYMLINK_NOFOLLOW : 0) !=
        0) {
      if (errno != ENOENT && errno != EACCES) return -1;
      if (level == 0) return -1;
      const bool link = ::lstat(place_of(path).c_str(), &status) == 0 && S_ISLNK(status.st_mode);
      type = link ? FTW_SLN : FTW_NS;
    } else if (S_ISLNK(status.st_mode)) {
      type = FTW_SL;
    } else if (S_ISDIR(status.st_mode)) {
      return enter(path, status, base, level);
    }
    return tell(path, status, type, base, level);
  }

  // A directory with everything below it. Skips one that is among its own parents, to which a link
  // can lead, and with FTW_MOUNT one of another file system. The names are read before the first is
  // visited, so that no directory stays open while the program's function runs.
  int enter(const std::string& path, const struct stat& status, int base, int level) {
    const std::pair identity(status.st_dev, status.st_ino);
    if (std::find(above_.begin(), above_.end(), identity) != above_.end()) return 0;
    if ((flags_ & FTW_MOUNT) != 0 && !above_.empty() && above_.front().first != status.st_dev)
      return 0;
    std::vector<std::string> names;
    const bool last = (flags_ & FTW_DEPTH) != 0;
    if (!list(place_of(path), names)) {
      if (errno != EACCES) return -1;
      return tell(path, status, FTW_DNR, base, level);
    }
    int result = last ? 0 : tell(path, status, FTW_D, base, level);
    if ((flags_ & FTW_ACTIONRETVAL) != 0 && result == FTW_SKIP_SUBTREE) return 0;
    above_.push_back(identity);
    const std::string start = path == "/" ? path : path + "/";
    for (std::size_t i = 0; i < names.size() && result == 0; ++i) {
      result = visit(start + names[i], static_cast<int>(start.size()), level + 1);
      if ((flags_ & FTW_ACTIONRETVAL) == 0) continue;
      if (result == FTW_SKIP_SUBTREE) result = 0;
    }
    above_.pop_back();
    if ((flags_ & FTW_ACTIONRETVAL) != 0 && result == FTW_SKIP_SIBLINGS) result = 0;
    return result == 0 && last ? tell(path, status, FTW_DP, base, level) : result;
  }

  // The path to access: a walk that changes the current directory needs one from the root.
  std::string place_of(const std::string& path) const {
    return real_root_.empty() ? path : real_root_ + path.substr(root_size_);
  }

  // False with errno if the directory can't be read.
  static bool list(const std::string& path, std::vector<std::string>& names) {
    DIR* stream = ::opendir(path.c_str());
    if (stream == nullptr) return false;
    while (const dirent* entry = ::readdir(stream)) {
      const std::string name = entry->d_name;
      if (name != "." && name != "..") names.push_back(name);
    }
    ::closedir(stream);
    return true;
  }

  // Calls the program's function. With FTW_CHDIR it first changes to the directory that has `path`.
  int tell(const std::string& path, const struct stat& status, int type, int base, int level) {
    FTW place{base, level};
    if (!real_root_.empty() && base > 0) {
      const std::string at = place_of(path);
      if (::chdir(at.substr(0, at.size() - path.size() + static_cast<std::size_t>(base)).c_str()) !=
          0)
        return -1;
    }
    return tell_(path.c_str(), &status, type, &place);
  }

  const Told& tell_;
  int flags_;
  std::string real_root_;                       // absolute; only for FTW_CHDIR, else empty
  std::size_t root_size_ = 0;                   // of the root in paths that are told
  std::vector<std::pair<dev_t, ino_t>> above_;  // the directories that are being visited
};

int walk(const char* path, int flags, const Told& tell) {
  try {
    return Walk(tell, flags).run(path);
  } catch (const std::bad_alloc&) {
    errno = ENOMEM;
    return -1;
  }
}

using Visit = int (*)(const char*, const struct stat*, int);
using NewVisit = int (*)(const char*, const struct stat*, int, FTW*);

}  // namespace

PYDIST_HOOK(int, nftw, const char* path, NewVisit visit, int open, int flags) {
  const Target target(AT_FDCWD, path);
  if (!target.in_pack()) return real_nftw(target.path, visit, open, flags);
  if (!target.is_entry()) return target.fail();
  return walk(path, flags, visit);
}
PYDIST_ALIAS(nftw64, nftw);

// The older function: without FTW, and without a type for broken links.
PYDIST_HOOK(int, ftw, const char* path, Visit visit, int open) {
  const Target target(AT_FDCWD, path);
  if (!target.in_pack()) return real_ftw(target.path, visit, open);
  if (!target.is_entry()) return target.fail();
  return walk(path, 0, [&](const char* at, const struct stat* status, int type, FTW*) {
    return visit(at, status, type == FTW_SLN ? FTW_NS : type);
  });
}
PYDIST_ALIAS(ftw64, ftw);

}  // namespace pydist::preload
