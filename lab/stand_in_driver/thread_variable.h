// Thread-local variables that are valid until the end of their thread.
#pragma once

namespace stand_in {

// Thread-local variable. Exit handlers and destructors of the program's thread-local variables may call the
// driver when its variables of that thread have been destroyed. They get a new one, which is not destroyed.
template <class T>
class ThreadVariable {
public:
  static T &get() {
    // Neither has a destructor, so both are valid until the thread's memory is freed.
    thread_local T *value = nullptr;
    thread_local bool ended = false;
    struct Guard {
      ~Guard() {
        delete value;
        value = nullptr;
        ended = true;
      }
    };
    if (!value) {
      value = new T();
      if (!ended)
        thread_local Guard guard;
    }
    return *value;
  }
};

} // namespace stand_in
